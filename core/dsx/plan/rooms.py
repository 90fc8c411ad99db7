"""Whether states fit where they are told to rest, before any of them is made."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from attrs import evolve
from torch import nn

from dsx.build import build
from dsx.contracts import Tier
from dsx.errors import DsxError
from dsx.plan.forecast import without_memory
from dsx.plan.rehearsal import Rehearsal
from dsx.plan.search import fits
from dsx.plan.subject import Subject
from dsx.plan.text import size
from dsx.plan.twin import Twin
from dsx.plugin import Plan
from dsx.registry import Registry
from dsx.resolve import Resolved
from dsx.store import Router


def footprints(resolved: Resolved, plan: Plan, model: nn.Module, registry: Registry) -> Sequence[int]:
    """Bytes that each tier's states will take on a rank, in the order of the manifest.

    The run's own parts are built on paper to know them. `DsxError` with the numbers, and with what would fit, if the
    ranks of this host together have more of them than there is room for.
    """
    paper = evolve(plan, device=torch.device("meta"))
    twin = Twin(plan.rank, plan.world, lambda bytes_: (0, 0))
    copy = without_memory(model)
    program = build(resolved, paper, copy, twin)
    router: Router = program.store
    found = [(plugin, tier, tier.footprint()) for plugin, tier in router.claimants]
    for part in (program.watch, program.connection, program.store):
        part.close()
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for plugin, tier, wanted in found:
        room = tier.room()
        if room is not None and wanted * local > room:
            raise DsxError(
                f"the states that '{plugin}' takes do not fit where they are to rest",
                where=f"[partition.{plugin}]",
                expected=f"{size(wanted)} on each of {local} rank(s) of this host",
                found=f"{size(room)} free ({tier.place})",
                remedy=_remedy(resolved, registry, model, tier, room, local),
            )
    return [wanted for _, _, wanted in found]


def _remedy(resolved: Resolved, registry: Registry, model: nn.Module, tier: Tier, room: int, local: int) -> str:
    """The nearest that fits: another layout, or more ranks."""

    def enough(found: Rehearsal) -> bool:
        held = sum(count for (place, _), count in found.states.items() if place == tier.place)
        return held * local <= room

    settings = resolved.manifest
    options = [
        f"'{fit.layout or 'replicated'}' from {fit.found.world} rank(s) on"
        for fit in fits(settings, registry, lambda world: Subject(lambda: without_memory(model), None), enough)
        if fit.found is not None
    ]
    return f"it fits with {', '.join(options)}" if options else "free space, name another place, or fewer `states`"
