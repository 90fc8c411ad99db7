"""`squares` by Triton: a sum for each block, then the sum of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.triton_blocks import launch, wide

BLOCK, LANES = 4096, 256
"""Elements of a block, and lanes: each adds up BLOCK / LANES squares in fp32 before it goes to fp64."""


def squares(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    sums = torch.empty(triton.cdiv(tensor.numel(), BLOCK), dtype=torch.float64, device=tensor.device)
    launch(_sums, tensor, tensor, sums, tensor.numel(), block=BLOCK, LANES=LANES, WIDE=wide(tensor))
    return sums.sum().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _sums(
    tensor: tl.tensor, sums: tl.tensor, count: tl.tensor, BLOCK: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr
) -> None:
    program = tl.program_id(0).to(tl.int64)
    start = program * BLOCK
    index = start + tl.arange(0, BLOCK)  # [BLOCK]
    # A whole block needs no mask: then its loads are as wide as can be, whatever `count` is a multiple of.
    if start + BLOCK <= count:
        values = tl.load(tensor + index).to(WIDE)
    else:
        values = tl.load(tensor + index, mask=index < count, other=0.0).to(WIDE)
    lanes = tl.sum(tl.reshape(values * values, (BLOCK // LANES, LANES)), axis=0)  # [LANES]
    tl.store(sums + program, tl.sum(lanes.to(tl.float64), axis=0))
