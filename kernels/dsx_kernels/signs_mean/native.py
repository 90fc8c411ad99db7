"""`signs_mean` by native.cpp."""

from __future__ import annotations

from ctypes import POINTER, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from dsx_kernels.library import Function, Slice, slices

_mean = Function(
    "dsx_signs_mean",
    None,
    POINTER(Slice),
    c_void_p,
    c_void_p,
    *(c_int64,) * 5,
    c_int32,
)


def signs_mean(bits: Tensor, scales: Tensor, counts: Tensor, out: Tensor) -> None:
    blocks = counts.numel()
    if blocks:
        tensors = slices(scales, out)
        sizes = (len(bits), bits.stride(0), scales.stride(0), blocks, out.numel() // blocks)
        _mean(tensors, counts.data_ptr(), bits.data_ptr(), *sizes, torch.get_num_threads())
