"""`dsx explain`: who fills each role of a run and why, and where every value comes from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import click

from dsx.cli import options
from dsx.manifest import Manifest
from dsx.registry import Registry
from dsx.resolve import NULL_OFFERS, Resolved, resolve
from dsx.roles import BUILD_ORDER, SECTIONS, Role


def _sections(function: Callable[..., None]) -> Callable[..., None]:
    """An option for each section of plugins."""
    for section in reversed(SECTIONS):
        words = f"What the plugins in [{section}] have to say of themselves, in place of the tables."
        function = click.option(f"--{section}", is_flag=True, help=words)(function)
    return function


@click.command()
@options.manifest
@options.overrides
@click.option("--nproc", type=click.IntRange(1), default=1, show_default=True, help="Ranks to explain it for.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@_sections
def command(manifest: str, overrides: tuple[str, ...], nproc: int, as_json: bool, **sections: bool) -> None:
    """Show what MANIFEST resolves to, without building anything."""
    settings = Manifest.load(manifest, set=overrides)
    resolved = resolve(settings, Registry.scan())
    if any(sections.values()):
        lines = list(_own_words(resolved, [section for section in SECTIONS if sections[section]]))
        for line in [json.dumps(lines, indent=2)] if as_json else lines:
            click.echo(line)
        return
    found = {
        "batch": _batch(settings, nproc),
        "roles": list(_roles(resolved)),
        "values": list(_values(resolved)),
        "notes": list(_notes(resolved)),
    }
    if as_json:
        click.echo(json.dumps(found, indent=2, default=str))
        return
    click.echo(f"{settings.run.name}: {found['batch']}\n")
    click.echo(_table(("role", "filled by", "why", "offers"), found["roles"]))  # type: ignore[arg-type]
    for line in _nesting(resolved):
        click.echo(line)
    click.echo("")
    click.echo(_table(("key", "value", "from"), found["values"]))  # type: ignore[arg-type]
    for note in found["notes"]:
        click.echo(f"\nnote: {note}")


def _own_words(resolved: Resolved, sections: Sequence[str]) -> Iterator[str]:
    for plugin, chosen in resolved.plugins:
        if plugin.descriptor.section not in sections:
            continue
        yield f"{plugin.name}: {plugin.descriptor.summary}"
        for line in plugin.descriptor.explain(chosen):
            yield f"  {line}".rstrip()
        yield ""


def _batch(settings: Manifest, world: int) -> str:
    batch = settings.resolve_batch(world)
    if batch.micro is None:
        return f"accumulation {batch.accumulation}, {world} rank(s), micro-batches as the script makes them"
    return f"{batch.global_} samples an update = {batch.micro} a micro-batch × {batch.accumulation} × {world} rank(s)"


def _roles(resolved: Resolved) -> Iterator[dict[str, str]]:
    for role in BUILD_ORDER:
        fillers = resolved.fillers.get(role.name, ())
        if not fillers:
            offers = ", ".join(sorted(NULL_OFFERS.get(role.name, ())))
            yield {"role": role.name, "filled by": f"core: {role.null}", "why": "no plugin named", "offers": offers}
        for filler in fillers:
            yield {
                "role": role.name,
                "filled by": f"{filler.plugin.name} ({filler.plugin.registration.distribution})",
                "why": filler.where,
                "offers": ", ".join(sorted(filler.fill.offers)),
            }


def _nesting(resolved: Resolved) -> Iterator[str]:
    """Chains, outermost first."""
    chains: Sequence[tuple[Role, str]] = [
        (role, inner)
        for role, inner in (
            (role, {"wrappers": "transport", "activations": "forward"}.get(role.name)) for role in BUILD_ORDER
        )
        if inner
    ]
    for role, inner in chains:
        names = [filler.plugin.name for filler in resolved.fillers.get(role.name, ())]
        if names:
            yield f"\n{role.name}: {'('.join([*names, inner])}{')' * len(names)}"


def _notes(resolved: Resolved) -> Iterator[str]:
    for plugin, chosen in resolved.plugins:
        for note in plugin.descriptor.notes(chosen, resolved.manifest.run.steps):
            yield f"{plugin.name}: {note}"


def _values(resolved: Resolved) -> Iterator[dict[str, str]]:
    """Every key that was given, and every option of the plugins in use."""
    settings = resolved.manifest
    given = dict(_leaves(settings.to_dict(), ""))
    for section, cls in (("run", settings.run), ("batch", settings.batch)):
        for field in attrs.fields(type(cls)):
            given.setdefault(f"{section}.{field.name.rstrip('_')}", getattr(cls, field.name))
    for plugin, chosen in resolved.plugins:
        for field in attrs.fields(type(chosen)) if attrs.has(type(chosen)) else ():
            given.setdefault(f"{plugin.descriptor.section}.{plugin.name}.{field.name}", getattr(chosen, field.name))
    for key, value in given.items():
        if value is not None:
            yield {"key": key, "value": str(value), "from": str(settings.origin(key))}


def _leaves(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> str:
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    lines = [dict(zip(columns, columns, strict=True)), *rows]
    return "\n".join("  ".join(f"{line[name]:{widths[name]}}" for name in columns).rstrip() for line in lines)
