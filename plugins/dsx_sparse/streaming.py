"""Plugin `streaming`: the first tokens as sinks, and the most recent ones (Xiao et al. 2023, arXiv 2309.17453).

Query p sees the keys j < sinks and those with p - j < recent.
"""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from dsx.plugin import Part, hook, non_negative, positive
from dsx_sparse.pattern import Pattern
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, between


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.streaming]`.

    modules  patterns of the names of attention sites that it claims
    block    tokens of a block: 16, 32, 64 or 128
    sinks    first tokens, which every query sees
    recent   tokens that a query sees backward, itself among them; forward as many if the call is not causal
    """

    sinks: Annotated[int, non_negative] = 4
    recent: Annotated[int, positive] = 256

    def region(self, shape: Shape) -> Region:
        here = shape.positions()
        return between(shape, here * 0, here * 0 + self.sinks) | between(
            shape, here - self.recent + 1, here + self.recent
        )


descriptor = describe("streaming", Options, "the first tokens as sinks, and the most recent ones")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("streaming", options)
