"""Plugin `dilated`: a window with gaps (Beltagy et al. 2020, arXiv 2004.05150, section 3.1), in blocks.

Block b sees the blocks b - k dilation for k = 0, ..., reach - 1, and those after it alike if the call is not causal.
The paper's gaps are of tokens; a gap of tokens touches every block of its span and saves nothing. Heads with different
dilations: `mixed`.
"""

from __future__ import annotations

from typing import Annotated

import torch
from attrs import frozen

from dsx.plugin import Part, hook, positive
from dsx_sparse.pattern import Pattern
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, blocks


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.dilated]`.

    modules   patterns of the names of attention sites that it claims
    block     tokens of a block: 16, 32, 64 or 128
    reach     blocks that a query sees backward, its own among them
    dilation  blocks from each to the next; 1 leaves no gap
    """

    reach: Annotated[int, positive] = 4
    dilation: Annotated[int, positive] = 2

    def region(self, shape: Shape) -> Region:
        place = torch.arange(shape.columns)
        apart = (place[:, None] - place).abs()
        return blocks(shape, ((apart % self.dilation == 0) & (apart < self.reach * self.dilation))[None])


descriptor = describe("dilated", Options, "a window of blocks with gaps")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("dilated", options)
