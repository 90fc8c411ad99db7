"""`signs` by Triton: a program for each block."""

from __future__ import annotations

from math import inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.signs.layout import GROUP, LANES
from dsx_kernels.triton_blocks import clamped, launch, number, read, write


def signs(
    value: Tensor | None,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    gradient: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    beta: float = 0.0,
    multiplier: float = 1.0,
    clip_value: float | None = None,
) -> None:
    blocks = counts.numel()
    if blocks:
        wide = tl.float64 if scales.dtype == torch.float64 else tl.float32
        tensors, block = (value, error, gradient, factor, counts, bits, scales), error.numel() // blocks
        share = (multiplier, inf if clip_value is None else clip_value, 1 - beta)
        launch(_signs, error, *tensors, *map(float, share), block=block, GROUP=GROUP, LANES=LANES, WIDE=wide)


@triton.jit  # type: ignore[untyped-decorator]
def _signs(
    value: tl.tensor,
    error: tl.tensor,
    gradient: tl.tensor,
    factor: tl.tensor,
    counts: tl.tensor,
    bits: tl.tensor,
    scales: tl.tensor,
    multiplier: tl.float64,
    limit: tl.float64,
    take: tl.float64,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    number = tl.program_id(0).to(tl.int64)
    counted = tl.load(counts + number)
    # A block that counts as a whole needs no mask: then accesses are as wide as can be.
    if counted >= BLOCK:
        _block(
            *(value, error, gradient, factor, multiplier, limit, take),
            *(bits, scales, number, counted, BLOCK, GROUP, LANES, WIDE, True),
        )
    else:
        _block(
            *(value, error, gradient, factor, multiplier, limit, take),
            *(bits, scales, number, counted, BLOCK, GROUP, LANES, WIDE, False),
        )


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    value: tl.tensor,
    error: tl.tensor,
    gradient: tl.tensor,
    factor: tl.tensor,
    multiplier: tl.tensor,
    limit: tl.tensor,
    take: tl.tensor,
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
        index = number * BLOCK + at + places
        sizes = tl.abs(_add(value, error, gradient, factor, multiplier, limit, take, index, mask, WIDE)).to(tl.float64)
        sum += tl.sum(tl.sum(sizes if WHOLE else tl.where(mask, sizes, 0.0), axis=0), axis=0)
    scale = (sum / tl.maximum(counted, 1).to(tl.float64)).to(WIDE)
    tl.store(scales + number, scale)

    for at in range(0, BLOCK, GROUP):
        index = number * BLOCK + at + places
        mask = None if WHOLE else at + places < counted
        sums = _add(value, error, gradient, factor, multiplier, limit, take, index, mask, WIDE)
        below = sums < 0 if WHOLE else mask & (sums < 0)
        write(error, index, mask, sums - tl.where(below, -scale, scale))
        words = tl.sum(below.to(tl.int32) << tl.arange(0, LANES)[:, None], axis=0)  # [word]
        tl.store(bits + (number * BLOCK + at) // LANES + tl.arange(0, LANES), words)


@triton.jit  # type: ignore[untyped-decorator]
def _add(
    value: tl.tensor,
    error: tl.tensor,
    gradient: tl.tensor,
    factor: tl.tensor,
    multiplier: tl.tensor,
    limit: tl.tensor,
    take: tl.tensor,
    index: tl.tensor,
    mask: tl.tensor,
    WIDE: tl.constexpr,
) -> tl.tensor:
    if gradient is None:
        added = read(value, index, mask, WIDE)
    else:
        added = clamped(read(gradient, index, mask, WIDE), multiplier, limit, WIDE)
        if factor is not None:
            added *= read(factor, index, mask, WIDE)
        if value is not None:
            before = read(value, index, mask, WIDE)
            added = before + number(take, WIDE) * (added - before)
    return added + read(error, index, mask, WIDE)
