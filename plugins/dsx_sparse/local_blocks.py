"""Plugin `local_blocks`: the block of the query and its neighbours (DeepSpeed's `LocalSlidingWindowSparsityConfig`).

Position p lies in block p // block; its keys are all tokens of the blocks from `before` to `after` around that one.
DeepSpeed's num_sliding_window_blocks = w is before = after = w // 2.
"""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from dsx.plugin import Part, hook, non_negative
from dsx_sparse.pattern import Pattern
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, between


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.local_blocks]`.

    modules  patterns of the names of attention sites that it claims
    block    tokens of a block: 16, 32, 64 or 128
    before   whole blocks that a query sees before its own
    after    whole blocks that it sees after its own, if the call is not causal
    """

    before: Annotated[int, non_negative] = 1
    after: Annotated[int, non_negative] = 1

    def region(self, shape: Shape) -> Region:
        own = shape.positions() // shape.block
        return between(shape, (own - self.before) * shape.block, (own + self.after + 1) * shape.block)


descriptor = describe("local_blocks", Options, "the query's block and its neighbours")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("local_blocks", options)
