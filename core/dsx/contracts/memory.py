"""Which memory tensors have, and where there is some."""

from __future__ import annotations

import ctypes
import mmap
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

_LARGE = 1 << 20
"""Bytes from which a buffer has pages of its own."""

_HUGE = 2 << 20
"""Bytes of a huge page, of most processors."""


def memory_of(tensor: Tensor) -> int:
    """A number of the memory that a tensor is a view of: equal for tensors that share it, also where it has no address,
    since it was given back or is on the meta device. Another memory may have it once that one is gone."""
    number: int = tensor.untyped_storage()._cdata
    return number


def with_values(device: torch.device) -> torch.device:
    """The device itself; the host's where it is meta, for numbers that somebody reads."""
    return torch.device("cpu") if device.type == "meta" else device


@cache
def huge_pages() -> bool:
    """Whether the kernel gives memory that asks for them pages of 2 MB, which are cleared ten times as fast as as many
    bytes of 4 KB pages."""
    try:
        said = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in said


def comes_back(device: torch.device) -> bool:
    """Whether new memory costs so little that a large buffer need not be kept from one use to the next. On the meta
    device, what holds for the host."""
    return device.type in ("cpu", "meta") and huge_pages()


def lasting(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [size] that stay for long. In host memory they have pages of their own: within the heap they would lie
    between activations that come and go, and leave holes that fit none."""
    count = size * dtype.itemsize
    if device.type != "cpu" or count < _LARGE or not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(size, dtype=dtype, device=device)
    if count < _HUGE or not huge_pages():
        return torch.frombuffer(_pages(count), dtype=dtype)
    pages = _pages(count + _HUGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE
    pages.madvise(mmap.MADV_HUGEPAGE, start, count // _HUGE * _HUGE)  # what is left would take 2 MB too
    return torch.frombuffer(pages, dtype=dtype, count=size, offset=start)


def _pages(count: int) -> mmap.mmap:
    return mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def trim() -> None:
    """Give free memory of the process's heap back to the system, as far as its allocator can: what is left of a model
    that was copied elsewhere lies in holes that nothing else may fit."""
    if sys.platform.startswith("linux"):
        give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
        if give_back is not None:
            give_back(0)
