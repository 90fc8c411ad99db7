"""Plugin `document`: tokens of packed sequences see only their own document, and within it what other patterns allow.

    [attention.document]
    use = ["sliding_window"]
    options.sliding_window.window = 512

Which token belongs to which document the call says: `segments`, integers [batch, tokens], an argument of
`dsx.contracts.Attend` and of `dsx.attention`. Any other pattern obeys `segments` as well; this one refuses a call
without. (Krell et al. 2021, arXiv 2107.02027, section 3.2.)
"""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from dsx.plugin import Part, hook
from dsx_sparse.groups import patterns, united
from dsx_sparse.pattern import Pattern, misfit
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.document]`.

    modules  patterns of the names of attention sites that it claims
    block    tokens of a block: 16, 32, 64 or 128
    use      names of patterns; within a document, a pair may attend if any of them allows it
    options  of these patterns, by name
    """

    use: tuple[str, ...] = ("dense",)
    options: Mapping[str, Mapping[str, object]] = field(factory=dict)

    def check(self) -> None:
        if not self.use:
            raise misfit("document", "use", [], "at least one pattern")
        self._patterns()

    @property
    def segmented(self) -> bool:
        return True

    def region(self, shape: Shape) -> Region:
        return united(self._patterns(), shape)

    def _patterns(self) -> tuple[Pattern, ...]:
        return patterns(self.use, self.options, self.block, "attention.document")


descriptor = describe("document", Options, "packed sequences that do not see each other")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("document", options)
