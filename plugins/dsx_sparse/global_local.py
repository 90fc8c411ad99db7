"""Plugin `global_local`: a sliding window and global tokens (Longformer: Beltagy et al. 2020, arXiv 2004.05150, 3.1).

Query p sees the keys j with |p - j| < window, and all global tokens; a global token sees every key. DeepSpeed's
`BSLongformerSparsityConfig` counts in blocks: num_sliding_window_blocks = w is about window = (w // 2) block + 1, and
global_block_indices and global_block_end_indices are starts and ends divided by block.
"""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from dsx.plugin import Part, hook, non_negative, positive
from dsx_sparse.global_blocks import check_ranges
from dsx_sparse.pattern import Pattern
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, between


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.global_local]`.

    modules  patterns of the names of attention sites that it claims
    block    tokens of a block: 16, 32, 64 or 128
    window   tokens that a query sees backward, itself among them; forward as many if the call is not causal
    starts   tokens that are global
    ends     where each range that begins in `starts` ends, itself outside; none: after one token
    """

    window: Annotated[int, positive] = 256
    starts: tuple[Annotated[int, non_negative], ...] = (0,)
    ends: tuple[Annotated[int, non_negative], ...] = ()

    def check(self) -> None:
        check_ranges("global_local", self.starts, self.ends)

    def region(self, shape: Shape) -> Region:
        here = shape.positions()
        found = between(shape, here - self.window + 1, here + self.window)
        for start, end in zip(self.starts, self.ends or [start + 1 for start in self.starts], strict=True):
            found |= between(shape, here * 0 + start, here * 0 + end)
            found |= between(shape, here * 0, ((here >= start) & (here < end)) * shape.keys)
        return found


descriptor = describe("global_local", Options, "a sliding window and global tokens (Longformer)")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("global_local", options)
