"""`accumulate` by Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.triton_blocks import launch, number, read, wide, write


def accumulate(into: Tensor, source: Tensor, scale: float) -> None:
    launch(_accumulate, into, into, source, into.numel(), float(scale), WIDE=wide(into))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _accumulate(
    into: tl.tensor, source: tl.tensor, count: tl.tensor, scale: tl.float64, BLOCK: tl.constexpr, WIDE: tl.constexpr
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)  # [BLOCK]
    # A whole block needs no mask: then accesses are as wide as can be, whatever `count` is a multiple of.
    if start + BLOCK <= count:
        _block(into, source, index, None, scale, WIDE)
    else:
        _block(into, source, index, index < count, scale, WIDE)


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    into: tl.tensor, source: tl.tensor, index: tl.tensor, mask: tl.tensor, scale: tl.tensor, WIDE: tl.constexpr
) -> None:
    added = read(source, index, mask, WIDE) * number(scale, WIDE)
    write(into, index, mask, read(into, index, mask, WIDE) + added)
