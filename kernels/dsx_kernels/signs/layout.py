"""How signs lie in memory, for every implementation."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 1024
"""Elements whose signs make 32 words of 32 bits: bit b of word j is element 32 b + j of the group. So packing and
unpacking never cross a lane, and a block is a whole number of groups."""

LANES = 32


def check(operation: str, elements: Tensor, counts: Tensor, bits: Tensor, scales: Tensor, rows: int | None) -> None:
    """`ValueError` unless these belong to one another.

    elements  [n]
    counts    int32 [blocks]
    bits      int32 [n / 32], or of `rows` ranks [rows, n / 32], each row contiguous
    scales    [blocks], or [rows, blocks]; fp64 where it is computed in fp64, else fp32
    """
    size, blocks = elements.numel(), counts.numel()
    if blocks == 0 and size == 0:
        return
    if blocks == 0 or size % (blocks * GROUP):
        raise ValueError(f"{operation}: {size} elements are not {blocks} blocks of a multiple of {GROUP} elements each")
    front = () if rows is None else (rows,)
    wanted = {
        "counts": (counts, (blocks,), torch.int32),
        "bits": (bits, (*front, size // LANES), torch.int32),
        "scales": (scales, (*front, blocks), scales.dtype),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != elements.device:
            raise ValueError(
                f"{operation}: {name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}, "
                f"not {dtype} {list(shape)} on {elements.device}"
            )
        if tensor.stride(-1) != 1:
            raise ValueError(f"{operation}: {name} is not contiguous: strides {tensor.stride()}")
    if scales.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"{operation}: scales are {scales.dtype}, not fp32 or fp64")
    if not elements.is_contiguous():
        raise ValueError(f"{operation}: its elements are not contiguous: strides {elements.stride()}")
