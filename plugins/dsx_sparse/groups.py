"""Patterns named within a pattern: `use` and a table of options for each, as in a manifest's own sections."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import or_

from dsx.errors import DsxError, near
from dsx.plugin import read_options
from dsx_sparse.pattern import Pattern
from dsx_sparse.region import Region, Shape

NAMES = (
    "dense",
    "local_blocks",
    "global_blocks",
    "sliding_window",
    "strided",
    "dilated",
    "global_local",
    "fixed",
    "variable",
    "bigbird",
    "streaming",
)
"""Patterns that others may be made of."""


def patterns(
    use: Sequence[str], options: Mapping[str, Mapping[str, object]], block: int, where: str
) -> tuple[Pattern, ...]:
    """The patterns that `use` names, with blocks of `block` tokens.

    Raises `DsxError` for a name that is none of `NAMES`, for options of a pattern that is not in use, and for an own
    `modules` or `block`; `ManifestError` for options that will not do.
    """
    for name in use:
        if name not in NAMES:
            raise _refusal(f"{where}.use names '{name}'", f"one of {', '.join(NAMES)}", near(name, NAMES))
    for name in options:
        if name not in use:
            raise _refusal(f"{where}.options.{name} is given, but {name} is not in {where}.use", None, near(name, use))
        for own in ("modules", "block"):
            if own in options[name]:
                raise _refusal(f"{where}.options.{name}.{own} is given", None, f"set {own} for the whole pattern")
    return tuple(_pattern(name, options.get(name, {}), block, f"{where}.options.{name}") for name in use)


def united(found: Sequence[Pattern], shape: Shape) -> Region:
    """What any of the patterns allows."""
    return reduce(or_, [pattern.region(shape) for pattern in found])


def _pattern(name: str, options: Mapping[str, object], block: int, where: str) -> Pattern:
    made: Pattern = read_options(
        {**options, "block": block}, importlib.import_module(f"dsx_sparse.{name}").Options, where
    )
    made.check()
    return made


def _refusal(what: str, expected: str | None, remedy: str | None) -> DsxError:
    return DsxError(what, expected=expected, remedy=remedy or "take it out, or add it to `use`")
