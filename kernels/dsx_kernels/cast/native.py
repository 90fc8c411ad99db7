"""`cast` by native.cpp."""

from __future__ import annotations

from ctypes import POINTER, c_int32, c_int64

import torch
from torch import Tensor

from dsx_kernels.library import Function, Slice, slices

_cast = Function("dsx_cast", None, POINTER(Slice), c_int64, c_int32)


def cast(source: Tensor, target: Tensor) -> None:
    _cast(slices(source, target), source.numel(), torch.get_num_threads())
