"""Options of the stages, and the modules that they name."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any

from attrs import frozen
from torch import nn

from dsx.contracts import Unit
from dsx.errors import DsxError, near
from dsx.plugin import Context, non_negative, positive


@frozen(kw_only=True)
class Options:
    """`[partition.zero1]`, `[partition.zero2]`.

    units        patterns of names of modules that are units, such as "layers.*": parameters of one are reduced and
                 published together. A module within such a one is part of it. None: the members of the model's longest
                 `ModuleList`
    merge_bytes  units smaller than this are joined with their neighbours until they are of this size: many small
                 messages cost more than one
    limit_bytes  parameters of a unit are cut at this size, never within one: each part's gradients are reduced as soon
                 as they are there. None: not cut, or fine where a plugin updates them as soon as they are there: at
                 1/64 of the model, but at 2 MB at least
    """

    units: tuple[str, ...] = ()
    merge_bytes: Annotated[int, non_negative] = 0
    limit_bytes: Annotated[int, positive] | None = None


@frozen(kw_only=True)
class GatherOptions(Options):
    """`[partition.zero3]`.

    units        patterns of names of modules that are units, such as "layers.*": parameters of one are gathered,
                 released and reduced together. A module within such a one is part of it. None: the members of the
                 model's longest `ModuleList`
    merge_bytes  units smaller than this are joined with their neighbours until they are of this size: many small
                 messages cost more than one
    limit_bytes  parameters of a unit are cut at this size, never within one: each part's gradients are reduced as soon
                 as they are there. None: not cut, or fine where a plugin updates them as soon as they are there: at
                 1/64 of the model, but at 2 MB at least
    prefetch     units gathered ahead of use, each of which takes its memory; 0: each when it is needed
    whole        patterns of names of units whose parameters stay whole on every rank, gathered once after each update;
                 "root" is what is in no unit
    """

    prefetch: Annotated[int, non_negative] = 1
    whole: tuple[str, ...] = ()


def cut(ctx: Context, options: Options, where: str) -> Sequence[Unit]:
    """The model's units as the options want them."""
    choices: dict[str, Any] = {
        "merge_bytes": options.merge_bytes,
        "limit_bytes": options.limit_bytes or ctx.early_bytes(),
    }
    if options.units:
        choices["choose"] = lambda model: matching(model, options.units, where)
    return ctx.flatten(**choices)


def matching(model: nn.Module, patterns: Sequence[str], where: str) -> list[tuple[str, nn.Module]]:
    """(name, module) of the outermost modules whose names match a pattern."""
    names = [name for name, _ in model.named_modules() if name]
    _refuse_idle(patterns, names, where, "module")
    chosen: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        inside = chosen and name.startswith(f"{chosen[-1][0]}.")
        if name and not inside and any(fnmatchcase(name, pattern) for pattern in patterns):
            chosen.append((name, module))
    return chosen


def whole_units(units: Sequence[Unit], patterns: Sequence[str], where: str) -> frozenset[int]:
    """Numbers of the units that match a pattern."""
    names = [unit.name or "root" for unit in units]
    _refuse_idle(patterns, names, where, "unit")
    return frozenset(n for n, name in enumerate(names) if any(fnmatchcase(name, pattern) for pattern in patterns))


def _refuse_idle(patterns: Sequence[str], names: Sequence[str], where: str, what: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise DsxError(
                f"no {what} of the model matches '{pattern}'",
                where=where,
                found=f"{what}s: {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}",
                remedy=near(pattern, names),
            )
