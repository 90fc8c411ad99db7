"""The memory of a tensor as Python's own functions for files take it: no copy, and no numpy."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory; valid as long as the tensor."""
    size = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())) if size else memoryview(b"")


def alone(tensor: Tensor) -> Tensor:
    """The same memory under a storage of its own size, for writers that write the whole storage of a view; valid as
    long as the tensor."""
    if tensor.numel() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return torch.frombuffer(raw(tensor), dtype=tensor.dtype).view(tensor.shape)
