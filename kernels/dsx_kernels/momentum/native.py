"""`momentum` by native.cpp."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_int32, c_int64
from math import inf

import torch
from torch import Tensor

from dsx_kernels.library import Function, Slice, numbers, slices

_momentum = Function("dsx_momentum", None, POINTER(Slice), POINTER(c_double), c_int64, c_int32)


def momentum(
    mean: Tensor, gradient: Tensor, factor: Tensor | None, *, beta: float, multiplier: float, clip_value: float | None
) -> None:
    limit = inf if clip_value is None else clip_value
    each = numbers(multiplier, limit, 1 - beta)
    _momentum(slices(mean, gradient, factor), each, mean.numel(), torch.get_num_threads())
