"""Where a model computes attention: modules whose attention can be replaced, of every kind that is known.

Core knows those of torch. A package adds its own kind by an entry point in the group `dsx.sites`: a function from the
model to its sites, called once per run if the manifest has anything in [attention].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from torch import nn

from dsx.contracts import Site
from dsx.entries import SITES, Entries, import_target
from dsx.sites import attribute, functional, multihead

Find = Callable[[nn.Module], Iterable[Site]]

KINDS: tuple[Find, ...] = (attribute.find, multihead.find, functional.find)


def find_sites(model: nn.Module) -> list[Site]:
    """Every site, in the order of the model's modules; the first kind that names a module has it."""
    found: dict[str, Site] = {}
    for find in (*_registered(), *KINDS):
        for site in find(model):
            found.setdefault(site.name, site)
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    return sorted(found.values(), key=lambda site: order[site.name])


def _registered() -> Iterator[Find]:
    for entry in Entries.scan(SITES).registrations:
        yield import_target(entry)
