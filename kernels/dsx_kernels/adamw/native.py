"""`adamw` by native.cpp."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_int32, c_int64

import torch
from torch import Tensor

from dsx_kernels.adamw.scalars import scalars
from dsx_kernels.library import Function, Slice, numbers, slices

_adamw = Function("dsx_adamw", None, POINTER(Slice), POINTER(c_double), c_int64, c_int32)


def adamw(
    gradient: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    param: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
    multiplier: float,
    clip_value: float | None,
) -> None:
    values = numbers(*scalars(lr, betas, eps, weight_decay, step, maximize, multiplier, clip_value))
    tensors = slices(gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, param)
    _adamw(tensors, values, master.numel(), torch.get_num_threads())
