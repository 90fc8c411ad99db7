"""`sgd` by native.cpp."""

from __future__ import annotations

import math
from ctypes import POINTER, c_double, c_int32, c_int64

import torch
from torch import Tensor

from dsx_kernels.library import Function, Slice, numbers, slices

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
    first = step == 1
    scalars = numbers(
        -multiplier if maximize else multiplier,
        math.inf if clip_value is None else clip_value,
        weight_decay,
        0.0 if first else momentum,
        1.0 if first else 1 - dampening,
        momentum,
        lr,
    )
    tensors = slices(gradient, master, momentum_buffer, param)
    _sgd(tensors, scalars, nesterov, master.numel(), torch.get_num_threads())
