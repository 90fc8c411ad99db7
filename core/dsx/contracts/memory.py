"""Which memory tensors have, and where there is some."""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

_LARGE = 1 << 20
"""Bytes from which a buffer has pages of its own."""


def memory_of(tensor: Tensor) -> int:
    """A number of the memory that a tensor is a view of: equal for tensors that share it, also where it has no address,
    since it was given back or is on the meta device. Another memory may have it once that one is gone."""
    number: int = tensor.untyped_storage()._cdata
    return number


def with_values(device: torch.device) -> torch.device:
    """The device itself; the host's where it is meta, for numbers that somebody reads."""
    return torch.device("cpu") if device.type == "meta" else device


def lasting(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [size] that stay for long. In host memory they have pages of their own: within the heap they would lie
    between activations that come and go, and leave holes that fit none."""
    count = size * dtype.itemsize
    if device.type != "cpu" or count < _LARGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(size, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype)


def trim() -> None:
    """Give free memory of the process's heap back to the system, as far as its allocator can: what is left of a model
    that was copied elsewhere lies in holes that nothing else may fit."""
    if sys.platform.startswith("linux"):
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if give_back is not None:
            give_back(0)
