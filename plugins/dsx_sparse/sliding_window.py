"""Plugin `sliding_window`: the nearest tokens (Beltagy et al. 2020, arXiv 2004.05150, section 3.1; Mistral's window).

Query p sees the keys j with |p - j| < window: itself and window - 1 before it, and as many after it if the call is not
causal. A Longformer's window of w tokens, w / 2 on each side, is window = w / 2 + 1.
"""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from dsx.plugin import Part, hook, positive
from dsx_sparse.pattern import Pattern
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, between


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.sliding_window]`.

    modules  patterns of the names of attention sites that it claims
    block    tokens of a block: 16, 32, 64 or 128
    window   tokens that a query sees backward, itself among them; forward as many if the call is not causal
    """

    window: Annotated[int, positive] = 256

    def region(self, shape: Shape) -> Region:
        here = shape.positions()
        return between(shape, here - self.window + 1, here + self.window)


descriptor = describe("sliding_window", Options, "the nearest tokens")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("sliding_window", options)
