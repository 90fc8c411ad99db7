"""`dsx init`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import click

from dsx.errors import DsxError


@click.command()
@click.argument("path", type=click.Path(path_type=Path), default=Path("run.toml"))
def command(path: Path) -> None:
    """Write a commented manifest to PATH (run.toml) that runs as it is. Asks nothing and overwrites nothing."""
    text = files("dsx.cli").joinpath("templates", "run.toml").read_text("utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise DsxError(f"{path} exists already", remedy="name another file: dsx init OTHER.toml") from None
    except OSError as error:
        raise DsxError(f"{path} cannot be written: {error.strerror}") from error
    click.echo(f"wrote {path}; train with: dsx run {path}")
