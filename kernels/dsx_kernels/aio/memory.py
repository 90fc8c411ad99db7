"""Memory that files are read into and written from as it lies."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from dsx_kernels.aio.layout import BLOCK, rounded

_HUGE = 2 << 20
"""Of Linux on most processors; where pages are of another size, the advice is only of less use."""


def aligned(nbytes: int) -> Tensor:
    """Zeros that start at a page, where direct I/O needs no copy.

    nbytes   rounded up to a multiple of 4,096, at least one of them
    returns  1-D uint8; its memory is given back with its last view

    From 2 MiB on it lies in huge pages where the system has them: a disk's driver gets 1 MiB as one range instead of
    256, which alone doubled what a virtual disk moves.
    """
    if nbytes < 0:
        raise ValueError(f"aligned: {nbytes} bytes")
    size = max(rounded(nbytes), BLOCK)
    whole = size // _HUGE * _HUGE
    if not whole or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(_mapped(size), dtype=torch.uint8)
    memory = _mapped(size + _HUGE)
    start = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE
    memory.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return torch.frombuffer(memory, dtype=torch.uint8, offset=start, count=size)


def _mapped(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):  # a forked process has its own, as of all other memory
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)
