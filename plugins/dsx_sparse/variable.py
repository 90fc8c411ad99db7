"""Plugin `variable`: local groups of several sizes, global blocks, random blocks: every parameter of DeepSpeed's
`VariableSparsityConfig`.

Blocks come in groups of the sizes in `local`, the last of which is repeated to the end. A block sees its own group,
all global blocks, and `random` blocks drawn by `seed` (for each head, if `per_head`); where the call is causal, out of
those up to its own.

DeepSpeed: num_random_blocks, local_window_blocks, global_block_indices, global_block_end_indices,
horizontal_global_attention, different_layout_per_head; attention = "unidirectional" is a causal call.
"""

from __future__ import annotations

from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.plugin import Part, hook, non_negative, positive
from dsx_sparse.chance import drawn
from dsx_sparse.global_blocks import check_ranges, chosen, cross
from dsx_sparse.pattern import Pattern, misfit
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, blocks


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.variable]`.

    modules     patterns of the names of attention sites that it claims
    block       tokens of a block: 16, 32, 64 or 128
    local       blocks of the first groups; the last number is that of all others
    starts      blocks that are global; those beyond the last block are ignored
    ends        where each range that begins in `starts` ends, itself outside; none: after one block
    horizontal  whether the queries in global blocks see every key, if the call is not causal
    random      blocks drawn for each query block
    seed        of the draw
    per_head    whether each head draws its own
    """

    local: tuple[Annotated[int, positive], ...] = (4,)
    starts: tuple[Annotated[int, non_negative], ...] = (0,)
    ends: tuple[Annotated[int, non_negative], ...] = ()
    horizontal: bool = False
    random: Annotated[int, non_negative] = 0
    seed: Annotated[int, non_negative] = 0
    per_head: bool = False

    def check(self) -> None:
        if not self.local:
            raise misfit("variable", "local", list(self.local), "the blocks of at least one group")
        check_ranges("variable", self.starts, self.ends)

    def region(self, shape: Shape) -> Region:
        group, count = self._groups(shape.columns), shape.columns
        found = (group[:, None] == group)[None]
        found = found | cross(chosen(count, self.starts, self.ends), self.horizontal and not shape.causal)
        if self.random:
            found = found | drawn(count, self.random, shape.heads if self.per_head else 1, self.seed, shape.causal)
        return blocks(shape, found)

    def _groups(self, count: int) -> Tensor:
        """The group of each of `count` blocks."""
        more = -(-max(0, count - sum(self.local)) // self.local[-1])
        sizes = torch.tensor([*self.local, *[self.local[-1]] * more])
        return torch.arange(len(sizes)).repeat_interleave(sizes)[:count]


descriptor = describe("variable", Options, "local groups of several sizes, global and random blocks")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("variable", options)
