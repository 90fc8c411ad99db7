"""Plugin `dense`: every key, or every earlier one where the call is causal, by the same engine as the sparse patterns.

The reference of the others, and for causal attention on CPUs faster than torch's own.
"""

from __future__ import annotations

from attrs import frozen

from dsx.plugin import Part, hook
from dsx_sparse.pattern import Pattern
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, everything


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.dense]`.

    modules  patterns of the names of attention sites that it claims
    block    tokens of a block: 16, 32, 64 or 128
    """

    @property
    def one_sequence(self) -> bool:
        return False

    def region(self, shape: Shape) -> Region:
        return everything(shape)


descriptor = describe("dense", Options, "all keys, by the engine of the sparse patterns")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("dense", options)
