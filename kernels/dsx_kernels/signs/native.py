"""`signs` by native.cpp."""

from __future__ import annotations

from ctypes import POINTER, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from dsx_kernels.library import Function, Slice, slices

_signs = Function("dsx_signs", None, POINTER(Slice), c_void_p, c_void_p, c_int64, c_int64, c_int32)


def signs(value: Tensor, error: Tensor, counts: Tensor, bits: Tensor, scales: Tensor) -> None:
    blocks = counts.numel()
    if blocks:
        block = error.numel() // blocks
        tensors = slices(value, error, scales)
        _signs(tensors, counts.data_ptr(), bits.data_ptr(), blocks, block, torch.get_num_threads())
