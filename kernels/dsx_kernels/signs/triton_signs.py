"""`signs` by Triton: a program for each block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.signs.layout import GROUP, LANES
from dsx_kernels.triton_blocks import launch, read, write


def signs(value: Tensor, error: Tensor, counts: Tensor, bits: Tensor, scales: Tensor) -> None:
    blocks = counts.numel()
    if blocks:
        wide = tl.float64 if scales.dtype == torch.float64 else tl.float32
        tensors, block = (value, error, counts, bits, scales), error.numel() // blocks
        launch(_signs, error, *tensors, block=block, GROUP=GROUP, LANES=LANES, WIDE=wide)


@triton.jit  # type: ignore[untyped-decorator]
def _signs(
    value: tl.tensor,
    error: tl.tensor,
    counts: tl.tensor,
    bits: tl.tensor,
    scales: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    counted = tl.load(counts + number)
    # A block that counts as a whole needs no mask: then accesses are as wide as can be.
    if counted >= BLOCK:
        _block(value, error, bits, scales, number, counted, BLOCK, GROUP, LANES, WIDE, WHOLE=True)
    else:
        _block(value, error, bits, scales, number, counted, BLOCK, GROUP, LANES, WIDE, WHOLE=False)


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    value: tl.tensor,
    error: tl.tensor,
    bits: tl.tensor,
    scales: tl.tensor,
    number: tl.tensor,
    counted: tl.tensor,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
    WHOLE: tl.constexpr,
) -> None:
    places = tl.arange(0, LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]  # [bit, word]
    sum = tl.full((), 0.0, tl.float64)
    for at in range(0, BLOCK, GROUP):
        mask = None if WHOLE else at + places < counted
        sizes = tl.abs(_add(value, error, number * BLOCK + at + places, mask, WIDE)).to(tl.float64)
        sum += tl.sum(tl.sum(sizes if WHOLE else tl.where(mask, sizes, 0.0), axis=0), axis=0)
    scale = (sum / tl.maximum(counted, 1).to(tl.float64)).to(WIDE)
    tl.store(scales + number, scale)

    for at in range(0, BLOCK, GROUP):
        index = number * BLOCK + at + places
        mask = None if WHOLE else at + places < counted
        sums = _add(value, error, index, mask, WIDE)
        below = sums < 0 if WHOLE else mask & (sums < 0)
        write(error, index, mask, sums - tl.where(below, -scale, scale))
        words = tl.sum(below.to(tl.int32) << tl.arange(0, LANES)[:, None], axis=0)  # [word]
        tl.store(bits + (number * BLOCK + at) // LANES + tl.arange(0, LANES), words)


@triton.jit  # type: ignore[untyped-decorator]
def _add(value: tl.tensor, error: tl.tensor, index: tl.tensor, mask: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    return read(value, index, mask, WIDE) + read(error, index, mask, WIDE)
