"""`signs_mean` by Triton: a program for each group of 1,024 elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.signs.layout import GROUP, LANES
from dsx_kernels.triton_blocks import launch, quotient, write


def signs_mean(bits: Tensor, scales: Tensor, counts: Tensor, out: Tensor) -> None:
    blocks = counts.numel()
    if blocks:
        wide = tl.float64 if scales.dtype == torch.float64 else tl.float32
        tensors, groups = (bits, scales, counts, out), out.numel() // blocks // GROUP
        sizes = (len(bits), bits.stride(0), scales.stride(0), groups)
        launch(_mean, out, *tensors, *sizes, block=GROUP, LANES=LANES, WIDE=wide)


@triton.jit(do_not_specialize=["ranks", "words_apart", "scales_apart", "groups"])  # type: ignore[untyped-decorator]
def _mean(
    bits: tl.tensor,
    scales: tl.tensor,
    counts: tl.tensor,
    out: tl.tensor,
    ranks: tl.tensor,
    words_apart: tl.tensor,
    scales_apart: tl.tensor,
    groups: tl.tensor,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    group = tl.program_id(0).to(tl.int64)
    number = group // groups
    places = tl.arange(0, LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]  # [bit, word]
    left = tl.load(counts + number) - (group % groups) * BLOCK
    sums = tl.zeros((LANES, LANES), WIDE)
    words, place = bits + group * LANES + tl.arange(0, LANES)[None, :], scales + number
    for _ in range(ranks):
        below = (tl.load(words) >> tl.arange(0, LANES)[:, None]) & 1
        scale = tl.load(place)
        sums += tl.where(below == 1, -scale, scale)
        words += words_apart
        place += scales_apart
    share = tl.full((LANES, LANES), 1.0, WIDE) * ranks.to(WIDE)
    # A group that counts as a whole needs no mask: then accesses are as wide as can be.
    if left >= BLOCK:
        write(out, group * BLOCK + places, None, quotient(sums, share))
    else:
        write(out, group * BLOCK + places, places < left, quotient(sums, share))
