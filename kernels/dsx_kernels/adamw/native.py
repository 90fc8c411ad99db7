"""`adamw` by native.cpp."""

from __future__ import annotations

import math
from ctypes import POINTER, c_double, c_int32, c_int64

import torch
from torch import Tensor

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
    scalars = numbers(
        -multiplier if maximize else multiplier,
        math.inf if clip_value is None else clip_value,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        1 - lr * weight_decay,
        lr / (1 - betas[0] ** step),
        1 / math.sqrt(1 - betas[1] ** step),
        eps,
    )
    tensors = slices(gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, param)
    _adamw(tensors, scalars, master.numel(), torch.get_num_threads())
