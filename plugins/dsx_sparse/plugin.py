"""What the plugins of all patterns have in common."""

from __future__ import annotations

from collections.abc import Mapping

from dsx.plugin import Descriptor, Fill, Part
from dsx_sparse.pattern import Pattern
from dsx_sparse.picture import explain
from dsx_sparse.sites import Sparse


def describe(name: str, options: type[Pattern], summary: str) -> Descriptor:
    """The descriptor of a pattern's plugin."""

    def fills(chosen: Pattern) -> Mapping[str, Fill]:
        chosen.check()
        return {"attention": Fill()}

    return Descriptor(name, "attention", 1, fills, options, summary, explain)


def part(name: str, options: Pattern) -> list[Part]:
    """What a pattern's hook returns."""
    return [Part("attention", lambda ctx: Sparse(name, options), Sparse.refuse_idle)]
