"""`lamb` by Triton: three numbers for each block, then of those."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.lamb import blocks
from dsx_kernels.triton_blocks import launch, number, read, root, wide, write


def lamb(
    new: Tensor,
    mean: Tensor,
    fresh: Tensor,
    factor: Tensor,
    weights: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    least: float,
) -> Tensor:
    found = blocks.room(mean)
    each = map(float, blocks.numbers(betas, eps, weight_decay, least))
    tensors = (new, mean, fresh, factor, weights, found)
    launch(_lamb, mean, *tensors, mean.numel(), found.shape[1], *each, block=blocks.BLOCK, WIDE=wide(mean))
    return blocks.total(found, mean.dtype)


STEP = tl.constexpr(512)
"""Elements that a program holds at a time: 4 a thread."""


@triton.jit(do_not_specialize=["count", "blocks"])  # type: ignore[untyped-decorator]
def _lamb(
    new: tl.tensor,
    mean: tl.tensor,
    fresh: tl.tensor,
    factor: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,
    count: tl.tensor,
    blocks: tl.tensor,
    take: tl.float64,
    keep: tl.float64,
    more: tl.float64,
    decay: tl.float64,
    least: tl.float64,
    eps: tl.float64,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    start = program * BLOCK
    means = tl.zeros((STEP,), WIDE)
    steps = tl.zeros((STEP,), WIDE)
    roots = tl.full((STEP,), float("inf"), WIDE)
    for part in range(0, BLOCK, STEP):
        index = start + part + tl.arange(0, STEP)  # [STEP]
        # A whole block needs no mask: then accesses are as wide as can be, whatever `count` is a multiple of.
        if start + BLOCK <= count:
            square, moved, size = _part(
                new, mean, fresh, factor, weights, index, None, take, keep, more, decay, least, eps, WIDE
            )
        else:
            mask = index < count
            square, moved, size = _part(
                new, mean, fresh, factor, weights, index, mask, take, keep, more, decay, least, eps, WIDE
            )
            square = tl.where(mask, square, 0.0)
            moved = tl.where(mask, moved, 0.0)
            size = tl.where(mask, size, float("inf"))
        means += square
        steps += moved
        roots = tl.minimum(roots, size)
    tl.store(found + program, tl.sum(means.to(tl.float64), axis=0))
    tl.store(found + blocks + program, tl.sum(steps.to(tl.float64), axis=0))
    tl.store(found + 2 * blocks + program, tl.min(roots, axis=0).to(tl.float64))


@triton.jit  # type: ignore[untyped-decorator]
def _part(
    new: tl.tensor,
    mean: tl.tensor,
    fresh: tl.tensor,
    factor: tl.tensor,
    weights: tl.tensor,
    index: tl.tensor,
    mask: tl.tensor,
    take: tl.tensor,
    keep: tl.tensor,
    more: tl.tensor,
    decay: tl.tensor,
    least: tl.tensor,
    eps: tl.tensor,
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Squares of momenta and of steps, and roots, [STEP] each."""
    now = read(new, index, mask, WIDE)
    before = read(mean, index, mask, WIDE)
    gradient = before + (now - before) * number(take, WIDE)
    variance = number(keep, WIDE) * read(fresh, index, mask, WIDE) + number(more, WIDE) * (gradient * gradient)
    write(fresh, index, mask, variance)
    write(mean, index, mask, now)
    moved = now + number(decay, WIDE) * read(weights, index, mask, WIDE)
    f = read(factor, index, mask, WIDE)
    floor = f * f * number(least, WIDE)
    size = root(tl.where(variance > floor, variance, floor)) + number(eps, WIDE) * f
    return now * now, moved * moved, size
