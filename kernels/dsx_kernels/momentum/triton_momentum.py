"""`momentum` by Triton."""

from __future__ import annotations

from math import inf

import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.triton_blocks import clamped, launch, number, read, wide, write


def momentum(
    mean: Tensor, gradient: Tensor, factor: Tensor | None, *, beta: float, multiplier: float, clip_value: float | None
) -> None:
    values = (multiplier, inf if clip_value is None else clip_value, 1 - beta)
    launch(_momentum, mean, mean, gradient, factor, mean.numel(), *map(float, values), WIDE=wide(mean))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _momentum(
    mean: tl.tensor,
    gradient: tl.tensor,
    factor: tl.tensor,
    count: tl.tensor,
    multiplier: tl.float64,
    limit: tl.float64,
    take: tl.float64,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)  # [BLOCK]
    # A whole block needs no mask: then accesses are as wide as can be, whatever `count` is a multiple of.
    if start + BLOCK <= count:
        _block(mean, gradient, factor, index, None, multiplier, limit, take, WIDE)
    else:
        _block(mean, gradient, factor, index, index < count, multiplier, limit, take, WIDE)


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    mean: tl.tensor,
    gradient: tl.tensor,
    factor: tl.tensor,
    index: tl.tensor,
    mask: tl.tensor,
    multiplier: tl.tensor,
    limit: tl.tensor,
    take: tl.tensor,
    WIDE: tl.constexpr,
) -> None:
    grad = clamped(read(gradient, index, mask, WIDE), multiplier, limit, WIDE)
    if factor is not None:
        grad *= read(factor, index, mask, WIDE)
    before = read(mean, index, mask, WIDE)
    write(mean, index, mask, before + number(take, WIDE) * (grad - before))
