"""`dsx kernels`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from dsx_kernels import Found


@click.command()
@click.argument("operations", nargs=-1)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(operations: tuple[str, ...], as_json: bool) -> None:
    """Show the implementations of each of OPERATIONS, or of all, on this machine.

    For each: the dtypes for which it is the one that runs, or why it cannot. DSX_KERNELS=operation=implementation,...
    chooses another.
    """
    from dsx_kernels import available

    found = [one for name in operations or (None,) for one in available(name)]
    if as_json:
        click.echo(json.dumps([_record(one) for one in found], indent=2))
        return
    for operation, several in groupby(found, key=lambda one: one.operation):
        click.echo(click.style(operation, bold=True))
        for line in _lines(several):
            click.echo(f"  {line}")


def _lines(found: Iterable[Found]) -> Iterable[str]:
    several = list(found)
    width = max(len(one.name) for one in several)
    return (f"{one.name:{width}}  {_state(one)}" for one in several)


def _state(one: Found) -> str:
    if one.missing:
        return f"not here: {one.missing}"
    if one.picked:
        return "; ".join(f"{device}: {', '.join(names) or 'any dtype'}" for device, names in _picked(one).items())
    return f"there, not picked; for {', '.join(one.devices)}" if one.devices else "there, not picked"


def _record(one: Found) -> dict[str, Any]:
    return {
        "operation": one.operation,
        "implementation": one.name,
        "devices": list(one.devices),
        "missing": one.missing,
        "picked": _picked(one),
    }


def _picked(one: Found) -> dict[str, list[str]]:
    return {device: [str(dtype).removeprefix("torch.") for dtype in dtypes] for device, dtypes in one.picked.items()}
