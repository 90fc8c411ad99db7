"""Plugin `fixed`: local groups of blocks, and summary blocks that later ones read (Sparse Transformer's fixed pattern:
Child et al. 2019, arXiv 1904.10509, section 4.3), with every parameter of DeepSpeed's `FixedSparsityConfig`.

Blocks come in groups of `local`. A block sees its own group. The summary of a group are `summary` of its blocks: the
last ones in pattern 0, those before them in pattern 1, and so on; head h has pattern h mod patterns. Every query sees
all summaries, where the call is causal those before it. A last group that is cut short has its summary at the same
place, moved left until it ends within the sequence. The paper's l and c are local and summary.

DeepSpeed: num_local_blocks, num_global_blocks, num_different_global_patterns (with different_layout_per_head),
horizontal_global_attention; attention = "unidirectional" is a causal call.
"""

from __future__ import annotations

from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.plugin import Part, hook, positive
from dsx_sparse.global_blocks import cross
from dsx_sparse.pattern import Pattern, misfit
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, blocks


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.fixed]`.

    modules     patterns of the names of attention sites that it claims
    block       tokens of a block: 16, 32, 64 or 128
    local       blocks of a group
    summary     blocks of a group that all others see; divides `local`
    patterns    different places of the summary, over which heads take turns; at most local / summary
    horizontal  whether the queries of a summary see every key, if the call is not causal
    """

    local: Annotated[int, positive] = 4
    summary: Annotated[int, positive] = 1
    patterns: Annotated[int, positive] = 1
    horizontal: bool = False

    def check(self) -> None:
        if self.local % self.summary:
            raise misfit("fixed", "summary", self.summary, f"a divisor of local = {self.local}")
        if self.patterns > self.local // self.summary:
            raise misfit("fixed", "patterns", self.patterns, f"at most local / summary = {self.local // self.summary}")

    def region(self, shape: Shape) -> Region:
        group = torch.arange(shape.columns) // self.local
        own = (group[:, None] == group)[None]
        different = min(self.patterns, shape.heads)
        each = [cross(self._summary(shape.columns, n), self.horizontal and not shape.causal) for n in range(different)]
        turns = torch.arange(shape.heads) % different if different > 1 else torch.zeros(1, dtype=torch.int64)
        return blocks(shape, (own | torch.cat(each))[turns])

    def _summary(self, count: int, pattern: int) -> Tensor:
        """Which of `count` blocks are in summaries: bool [count]."""
        first = self.local - (1 + pattern) * self.summary
        place, whole = torch.arange(count), count - count % self.local
        within = place % self.local - first
        found = (place < whole) & (within >= 0) & (within < self.summary)
        if whole < count:
            start = max(0, min(whole + first, count - self.summary))
            found[start : start + self.summary] = True
        return found


descriptor = describe("fixed", Options, "local groups, and summaries that later ones read (Sparse Transformer)")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("fixed", options)
