"""`dsx export`: a checkpoint's weights as safetensors, in the layout of Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dsx.cli import options


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Of all floating-point tensors; by default each keeps the one in which it was trained.",
)
@click.option(
    "--shard-size", callback=options.size, help="The most that one file holds, as 5GB; else there is one file."
)
@click.option("--overwrite", is_flag=True, help="Replace an earlier export.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def command(path: Path, out: Path, dtype: str | None, shard_size: int | None, overwrite: bool, as_json: bool) -> None:
    """Write the weights of the checkpoint PATH to the folder OUT; of a run's folder, those of its latest.

    OUT has model.safetensors, or several files with an index, and the config.json of a model that has one:
    `from_pretrained(OUT)` of transformers loads it. Needs neither the model nor the ranks that wrote the checkpoint,
    nor memory for it. OUT appears whole or not at all.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from dsx.weights.archive import export

    columns = (TextColumn("exporting"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("exporting", total=None)
        found = export(
            path,
            out,
            dtype,
            shard_size,
            overwrite=overwrite,
            begun=lambda size: progress.update(bar, total=size),
            told=lambda size: progress.advance(bar, size),
        )
    told = {"folder": str(found.folder), "files": found.files, "tensors": found.tensors, "bytes": found.bytes}
    click.echo(
        json.dumps(told, indent=2)
        if as_json
        else f"{found.folder}: {found.tensors} tensors, {found.bytes / 1e6:.1f} MB, in {', '.join(_shown(found.files))}"
    )


def _shown(files: tuple[str, ...]) -> list[str]:
    return list(files) if len(files) < 6 else [files[0], "...", *files[-3:]]
