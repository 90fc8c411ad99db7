"""`dsx plan`: what a run will take of memory, traffic and time, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from dsx.cli import options
from dsx.errors import DsxError

if TYPE_CHECKING:
    from rich.console import Console

    from dsx.manifest import Manifest
    from dsx.plan.rehearsal import Rehearsal
    from dsx.plan.resident import Resident
    from dsx.plan.search import Fit
    from dsx.plan.speed import Estimate


@click.command()
@options.manifest
@options.overrides
@click.option("--world", type=click.IntRange(1), default=1, show_default=True, help="Ranks to plan for.")
@click.option("--local", type=click.IntRange(1), help="Ranks of one host; default: all.")
@click.option(
    "--parameters", callback=options.size, metavar="SIZE", help="Plan for a model of so many parameters, e.g. 7.5e9."
)
@click.option(
    "--device-memory",
    callback=options.size,
    metavar="SIZE",
    help="Find the fewest ranks that fit into it under each layout.",
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Default: cuda if there is one here.")
@click.option("--link", type=click.FloatRange(0, min_open=True), metavar="MBIT", help="Rate between hosts, a second.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def command(
    manifest: str,
    overrides: tuple[str, ...],
    world: int,
    local: int | None,
    parameters: int | None,
    device_memory: int | None,
    device: str | None,
    link: float | None,
    as_json: bool,
) -> None:
    """Say what each rank of MANIFEST's run will hold, send and compute, without running it.

    The run's own parts are built on paper, for any number of ranks, and make updates there; nothing is allocated.
    """
    import torch

    from dsx.manifest import Manifest
    from dsx.plan.forecast import forecast
    from dsx.plan.resident import RESIDENT
    from dsx.plan.text import fitting, lines, to_json

    settings = Manifest.load(manifest, set=overrides)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    near = 0 if kind == "cuda" else local
    found, resident = forecast(parameters, settings, world=world, local=near), RESIDENT[kind]
    time = _time(found.rehearsal, kind, local or world, link)
    fits = _fits(settings, parameters, near, device_memory, resident) if device_memory else []
    if as_json:
        click.echo(json.dumps(to_json(found, resident, time, fits), indent=2))
        return
    click.echo("\n".join(lines(settings.run.name, found, resident, time)))
    if device_memory:
        click.echo("\n".join(fitting(fits, device_memory, resident)))


def _time(found: Rehearsal, kind: str, ranks: int, link: float | None) -> Estimate | str:
    """How long an update takes; or why that is not known, in one line."""
    from dsx.plan.profile import load
    from dsx.plan.speed import estimate

    try:
        return estimate(found.work, load(kind, ranks), found.accumulation, link * 1e6 / 8 if link else None)
    except DsxError as error:
        return f"{error.what}; {error.remedy}" if error.remedy else error.what


def _fits(
    settings: Manifest, parameters: int | None, local: int | None, limit: int, resident: Resident
) -> Sequence[Fit]:
    from rich.progress import track

    from dsx.plan.forecast import subject_of
    from dsx.plan.search import fits
    from dsx.registry import Registry

    def enough(found: Rehearsal) -> bool:
        return resident.total(found) <= limit

    found = fits(settings, Registry.scan(), lambda world: subject_of(parameters, settings, None, world), enough, local)
    return list(track(found, "looking for what fits", console=_stderr(), transient=True))


def _stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True)
