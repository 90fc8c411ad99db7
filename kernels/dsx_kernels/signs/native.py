"""`signs` by native.cpp."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p
from math import inf

import torch
from torch import Tensor

from dsx_kernels.library import Function, Slice, numbers, slices

_signs = Function("dsx_signs", None, POINTER(Slice), POINTER(c_double), c_void_p, c_void_p, c_int64, c_int64, c_int32)


def signs(
    value: Tensor | None,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    gradient: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    beta: float = 0.0,
    multiplier: float = 1.0,
    clip_value: float | None = None,
) -> None:
    blocks = counts.numel()
    if blocks:
        tensors = slices(value, error, gradient, factor, scales)
        each = numbers(multiplier, inf if clip_value is None else clip_value, 1 - beta)
        block, threads = error.numel() // blocks, torch.get_num_threads()
        _signs(tensors, each, counts.data_ptr(), bits.data_ptr(), blocks, block, threads)
