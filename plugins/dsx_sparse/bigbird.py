"""Plugin `bigbird`: a window, global blocks and random blocks (Zaheer et al. 2020, arXiv 2007.14062, section 2).

Block b sees the blocks within `window` // 2 of it, the first `globals` blocks, and `random` blocks drawn by `seed` (for
each head, if `per_head`); the first `globals` blocks see every key. Where the call is causal, each of these up to the
query; random blocks are drawn out of those. DeepSpeed's `BigBirdSparsityConfig`: num_sliding_window_blocks,
num_global_blocks, num_random_blocks, different_layout_per_head.
"""

from __future__ import annotations

from typing import Annotated

import torch
from attrs import frozen

from dsx.plugin import Part, hook, non_negative, positive
from dsx_sparse.chance import drawn
from dsx_sparse.global_blocks import cross
from dsx_sparse.pattern import Pattern, misfit
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, blocks


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.bigbird]`.

    modules   patterns of the names of attention sites that it claims
    block     tokens of a block: 16, 32, 64 or 128
    window    blocks of the window, an odd number: the query's own and as many on each side
    globals   first blocks that see all, and that all see
    random    blocks drawn for each query block
    seed      of the draw
    per_head  whether each head draws its own
    """

    window: Annotated[int, positive] = 3
    globals: Annotated[int, non_negative] = 1
    random: Annotated[int, non_negative] = 1
    seed: Annotated[int, non_negative] = 0
    per_head: bool = True

    def check(self) -> None:
        if self.window % 2 == 0:
            raise misfit("bigbird", "window", self.window, "an odd number of blocks")

    def region(self, shape: Shape) -> Region:
        place, count = torch.arange(shape.columns), shape.columns
        near = ((place[:, None] - place).abs() <= self.window // 2)[None]
        found = near | cross(place < self.globals, horizontal=True)
        return blocks(
            shape,
            found | drawn(count, self.random, shape.heads if self.per_head else 1, self.seed, shape.causal),
        )


descriptor = describe("bigbird", Options, "a window, global blocks and random blocks")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("bigbird", options)
