"""Options that several commands share."""

from __future__ import annotations

import click

manifest = click.argument("manifest", type=click.Path(dir_okay=False))

overrides = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set any key of the manifest, e.g. --set optimize.clip_norm=1.0; the value is read as TOML, else as text.",
)
