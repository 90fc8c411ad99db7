"""`sgd` by native.cpp."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_int32, c_int64

import torch
from torch import Tensor

from dsx_kernels.library import Function, Slice, numbers, slices
from dsx_kernels.sgd.scalars import scalars

_sgd = Function("dsx_sgd", None, POINTER(Slice), POINTER(c_double), c_int32, c_int64, c_int32)


def sgd(
    gradient: Tensor,
    master: Tensor,
    momentum_buffer: Tensor | None,
    param: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    step: int,
    maximize: bool,
    multiplier: float,
    clip_value: float | None,
) -> None:
    values = numbers(*scalars(lr, momentum, dampening, weight_decay, step, maximize, multiplier, clip_value))
    tensors = slices(gradient, master, momentum_buffer, param)
    _sgd(tensors, values, nesterov, master.numel(), torch.get_num_threads())
