"""The smallest number of ranks on which a run fits, under each layout that is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from attrs import frozen

from dsx.errors import DsxError, ManifestError
from dsx.manifest import Manifest
from dsx.plan.rehearsal import Rehearsal, rehearse
from dsx.plan.subject import Subject
from dsx.registry import Registry
from dsx.resolve import resolve

MOST = 1024
"""Ranks, beyond which nothing is tried."""

LAYOUT = "layout"


@frozen
class Fit:
    """A layout, and what it takes.

    layout    name of the plugin; None: core's own, replicated
    found     on the fewest ranks on which a rank's share fits; None if it does not on any
    tried     the largest number of ranks that was tried
    reason    why it cannot be used at all, in one line
    """

    layout: str | None
    found: Rehearsal | None
    tried: int
    reason: str = ""


def fits(
    settings: Manifest,
    registry: Registry,
    subject: Callable[[int], Subject],
    enough: Callable[[Rehearsal], bool],
    local: int | None = None,
) -> Iterator[Fit]:
    """For core's layout and every installed one, with its default options unless the manifest has others.

    subject  what is planned for on so many ranks
    enough   whether a rank's share fits
    """
    for layout in [None, *layouts(registry)]:
        try:
            yield _smallest(layout, _with_layout(settings, registry, layout), registry, subject, enough, local)
        except DsxError as error:
            yield Fit(layout, None, 0, str(error).splitlines()[0])


def layouts(registry: Registry) -> list[str]:
    """Plugins that fill the role of the layout; those that cannot be imported are left out."""
    found = []
    for name in registry.entries.names():
        try:
            plugin = registry.load(name)
            if LAYOUT in plugin.descriptor.filled(plugin.descriptor.options() if plugin.descriptor.options else None):
                found.append(name)
        except (DsxError, TypeError):  # broken, or with an option that has no default: no layout to try unasked
            continue
    return found


def _with_layout(settings: Manifest, registry: Registry, layout: str | None) -> Manifest:
    content = settings.to_dict()
    section = content.setdefault("partition", {})
    others = set(layouts(registry)) - {layout}
    used = [name for name in section.get("use", []) if name not in others and name != layout]
    section["use"] = [layout, *used] if layout else used
    for name in others:
        section.pop(name, None)
    return Manifest.of(content)


def _smallest(
    layout: str | None,
    settings: Manifest,
    registry: Registry,
    subject: Callable[[int], Subject],
    enough: Callable[[Rehearsal], bool],
    local: int | None,
) -> Fit:
    resolved = resolve(settings, registry)

    def share(world: int) -> Rehearsal:
        return rehearse(resolved, subject(world), world=world, local=local)

    worlds = [world for world in range(1, MOST + 1) if _even(settings, world)]
    if not worlds:
        raise DsxError("[batch] fits no number of ranks")
    best: Rehearsal | None = None
    last, low = 0, 0
    for at in _doubling(worlds):
        last, found = at, share(worlds[at])
        if enough(found):
            best = found
            break
        low = at + 1
    high = last
    while best is not None and low < high:
        middle = (low + high) // 2
        found = share(worlds[middle])
        best, low, high = (found, low, middle) if enough(found) else (best, middle + 1, high)
    return Fit(layout, best, worlds[last])


def _doubling(worlds: Sequence[int]) -> Iterator[int]:
    """Positions of 1, 2, 4, ... ranks, or of the next number that is possible; and the last position."""
    wanted = 1
    for at, world in enumerate(worlds):
        if world >= wanted or at == len(worlds) - 1:
            yield at
            wanted = 2 * world


def _even(settings: Manifest, world: int) -> bool:
    try:
        settings.resolve_batch(world)
    except ManifestError:
        return False
    return True
