"""`squares` by native.cpp."""

from __future__ import annotations

from ctypes import c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from dsx_kernels.library import CODES, Function

_blocks = Function("dsx_squares_blocks", c_int64, c_int64)
_squares = Function("dsx_squares", c_double, c_void_p, c_int32, c_int64, c_void_p, c_int32)


def squares(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    count = tensor.numel()
    sums = torch.empty(_blocks(count), dtype=torch.float64)
    total = _squares(tensor.data_ptr(), CODES[tensor.dtype], count, sums.data_ptr(), torch.get_num_threads())
    return torch.tensor(total, dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
