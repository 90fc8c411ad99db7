"""Plugin `mixed`: different patterns for groups of heads, each the union of any others.

    [[attention.mixed.groups]]
    heads = 6
    use = ["sliding_window", "global_blocks"]
    options.sliding_window.window = 512

    [[attention.mixed.groups]]
    heads = 2
    use = ["dense"]

As in Child et al. 2019, arXiv 1904.10509, section 4.2, where heads have different patterns, and DeepSpeed's
different_layout_per_head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from attrs import field, frozen

from dsx.errors import DsxError
from dsx.plugin import Part, hook, positive
from dsx_sparse.groups import patterns, united
from dsx_sparse.pattern import Pattern, misfit
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, mix


@frozen(kw_only=True)
class Group:
    """`[[attention.mixed.groups]]`.

    heads    how many; None: all that are left
    use      names of patterns; a pair may attend if any of them allows it
    options  of these patterns, by name
    """

    heads: Annotated[int, positive] | None = None
    use: tuple[str, ...] = ("dense",)
    options: Mapping[str, Mapping[str, object]] = field(factory=dict)


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.mixed]`.

    modules  patterns of the names of attention sites that it claims
    block    tokens of a block: 16, 32, 64 or 128
    groups   of heads, in order: tables with `heads` (absent in the last one: all that are left), `use` and `options`
    """

    groups: tuple[Group, ...] = (Group(),)

    def check(self) -> None:
        if not self.groups:
            raise misfit("mixed", "groups", [], "at least one")
        if any(group.heads is None for group in self.groups[:-1]):
            raise DsxError("a group of heads without a number of heads is not the last", where="[attention.mixed]")
        for number, group in enumerate(self.groups):
            if not group.use:
                raise misfit("mixed", f"groups[{number}].use", [], "at least one pattern")
            self._patterns(number)

    def region(self, shape: Shape) -> Region:
        counts = self._counts(shape.heads)
        parts = []
        for number, count in enumerate(counts):
            own = Shape(count, shape.queries, shape.keys, shape.block, shape.causal)
            parts.append((count, united(self._patterns(number), own)))
        return mix(parts)

    def _patterns(self, number: int) -> tuple[Pattern, ...]:
        group = self.groups[number]
        return patterns(group.use, group.options, self.block, f"attention.mixed.groups[{number}]")

    def _counts(self, heads: int) -> list[int]:
        named = sum(group.heads or 0 for group in self.groups)
        counts = [heads - named if group.heads is None else group.heads for group in self.groups]
        if sum(counts) != heads or counts[-1] <= 0:
            raise DsxError(
                f"groups of {', '.join(str(group.heads or 'the other') for group in self.groups)} heads do not make up "
                f"the {heads} heads of a site",
                where="[attention.mixed]",
                remedy="change the numbers, or claim sites with other heads by another plugin",
            )
        return counts


descriptor = describe("mixed", Options, "different patterns for groups of heads")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("mixed", options)
