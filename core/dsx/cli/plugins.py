"""`dsx plugins`: the list, and the examination of one."""

from __future__ import annotations

import json
from typing import Any

import attrs
import click


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List installed plugins, without importing any."""
    if ctx.invoked_subcommand is not None:
        return
    from dsx.entries import PLUGINS, Entries

    registry = Entries.scan(PLUGINS)
    if as_json:
        click.echo(json.dumps([attrs.asdict(entry) for entry in registry.registrations], indent=2))
        return
    width = max((len(entry.name) for entry in registry.registrations), default=0)
    target = max((len(entry.target) for entry in registry.registrations), default=0)
    for entry in registry.registrations:
        click.echo(f"{entry.name:{width}}  {entry.target:{target}}  {entry.distribution}")
    for note in registry.notes:
        click.echo(f"note: {note}", err=True)


@command.command()
@click.argument("name")
def check(name: str) -> None:
    """Load the plugin NAME and examine its descriptor, options and hook."""
    from dsx.hooks import Hooks
    from dsx.registry import Registry

    plugin = Registry.scan().load(name)
    Hooks([plugin])
    descriptor = plugin.descriptor
    click.echo(f"{plugin.registration}: {descriptor.summary or 'no summary'}")
    click.echo(f"  use it in  [{descriptor.section}]")
    for field in attrs.fields(descriptor.options) if descriptor.options else ():
        default = "required" if field.default is attrs.NOTHING else f"default {_default(field)!r}"
        click.echo(f"  option     {field.name}: {default}")
    if callable(descriptor.fills):
        click.echo("  fills      depends on its options")
        return
    for role, fill in descriptor.fills.items():
        needs = ", ".join(need.capability for need in fill.needs)
        offers = ", ".join(sorted(fill.offers))
        click.echo(f"  fills      {role}; offers {offers or 'nothing'}; needs {needs or 'nothing'}")


def _default(field: attrs.Attribute[Any]) -> Any:
    factory = getattr(field.default, "factory", None)
    return factory() if factory is not None else field.default
