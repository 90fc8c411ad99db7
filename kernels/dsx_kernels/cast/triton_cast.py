"""`cast` by Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.triton_blocks import launch, write


def cast(source: Tensor, target: Tensor) -> None:
    launch(_cast, source, source, target, source.numel())


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _cast(source: tl.tensor, target: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)  # [BLOCK]
    # A whole block needs no mask: then accesses are as wide as can be, whatever `count` is a multiple of.
    if start + BLOCK <= count:
        _block(source, target, index, None)
    else:
        _block(source, target, index, index < count)


@triton.jit  # type: ignore[untyped-decorator]
def _block(source: tl.tensor, target: tl.tensor, index: tl.tensor, mask: tl.tensor) -> None:
    values = tl.load(source + index, mask=mask)
    # Between the two 16-bit types there is no direct way.
    wide = values.to(tl.float32) if source.dtype.element_ty.primitive_bitwidth == 16 else values
    write(target, index, mask, wide)
