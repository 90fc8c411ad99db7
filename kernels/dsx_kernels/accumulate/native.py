"""`accumulate` by native.cpp."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_int32, c_int64

import torch
from torch import Tensor

from dsx_kernels.library import Function, Slice, slices

_accumulate = Function("dsx_accumulate", None, POINTER(Slice), c_double, c_int64, c_int32)


def accumulate(into: Tensor, source: Tensor, scale: float) -> None:
    _accumulate(slices(into, source), scale, into.numel(), torch.get_num_threads())
