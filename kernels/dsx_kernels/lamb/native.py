"""`lamb` by native.cpp."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from dsx_kernels import library
from dsx_kernels.lamb import blocks
from dsx_kernels.library import CODES, Function

_lamb = Function("dsx_lamb", None, *[c_void_p] * 5, c_int32, POINTER(c_double), c_int64, c_void_p, c_int32)


def lamb(
    new: Tensor,
    mean: Tensor,
    fresh: Tensor,
    factor: Tensor,
    weights: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    least: float,
) -> Tensor:
    tensors, found = (new, mean, fresh, factor, weights), blocks.room(mean)
    each = library.numbers(*blocks.numbers(betas, eps, weight_decay, least))
    pointers = (tensor.data_ptr() for tensor in tensors)
    _lamb(*pointers, CODES[mean.dtype], each, mean.numel(), found.data_ptr(), torch.get_num_threads())
    return blocks.total(found, mean.dtype)
