"""Memory that files are read into and written from as it lies."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from dsx_kernels.aio.layout import BLOCK, rounded


def aligned(nbytes: int) -> Tensor:
    """Zeros that start at a page, where direct I/O needs no copy.

    nbytes   rounded up to a multiple of 4,096, at least one of them
    returns  1-D uint8; its memory is given back with its last view
    """
    if nbytes < 0:
        raise ValueError(f"aligned: {nbytes} bytes")
    return torch.frombuffer(_mapped(max(rounded(nbytes), BLOCK)), dtype=torch.uint8)


def _mapped(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):  # a forked process has its own, as of all other memory
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, nbytes)
