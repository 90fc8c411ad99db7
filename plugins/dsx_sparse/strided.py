"""Plugin `strided`: the last blocks, and every stride-th before (Child et al. 2019, arXiv 1904.10509, section 4.3).

With the paper's A1 = {t, ..., i}, t = max(0, i - l), and A2 = {j : (i - j) mod l = 0} read for blocks in place of
tokens, as its authors' kernels do: a stride of single tokens touches every block and saves nothing. If the call is not
causal, the same holds to the right.
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
    """`[attention.strided]`.

    modules  patterns of the names of attention sites that it claims
    block    tokens of a block: 16, 32, 64 or 128
    stride   l, in blocks
    """

    stride: Annotated[int, positive] = 8

    def region(self, shape: Shape) -> Region:
        place = torch.arange(shape.columns)
        apart = (place[:, None] - place).abs()
        return blocks(shape, ((apart <= self.stride) | (apart % self.stride == 0))[None])


descriptor = describe("strided", Options, "the last blocks, and every stride-th before")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("strided", options)
