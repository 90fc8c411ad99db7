"""Options that several commands share."""

from __future__ import annotations

import re

import click

manifest = click.argument("manifest", type=click.Path(dir_okay=False))

overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set any key of the manifest, e.g. --set optimize.clip_norm=1.0; the value is read as TOML, else as text.",
)

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def size(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """A callback for options of so many bytes or things: 5GB and 7.5e9 in powers of ten, 24GiB in those of two."""
    if value is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?) ?([KMGT]?I?)B?", value.strip(), re.IGNORECASE)
    count = float(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0
    if not 1 <= count < float("inf"):
        raise click.BadParameter(f"'{value}' is no size, such as 5GB, 24GiB or 7.5e9", ctx, param)
    return int(count)
