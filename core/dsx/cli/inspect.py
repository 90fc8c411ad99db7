"""`dsx inspect`: what is in a checkpoint, and whether it is whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from dsx.errors import CheckpointError


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read every tensor and compare its checksum.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def command(path: Path, verify: bool, as_json: bool) -> None:
    """Show the checkpoint in the folder PATH; of a run's folder, its latest.

    Runs no code of the checkpoint and needs neither the model nor the ranks that wrote it.
    """
    from dsx.checkpoint.series import locate

    folder = locate(path)
    found = describe(folder)
    if verify:
        found["verified"] = _verify(folder)
    click.echo(json.dumps(found, indent=2) if as_json else _text(found))


def describe(folder: Path) -> dict[str, Any]:
    """Everything about a checkpoint but its values. Raises `CheckpointError` where it is not whole."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from dsx.checkpoint.info import read_info
    from dsx.checkpoint.storage import read_metadata

    info = read_info(folder)
    tensors = {
        name: {"shape": list(entry.size), "dtype": str(entry.properties.dtype).removeprefix("torch.")}
        for name, entry in read_metadata(folder).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    return {
        "path": str(folder),
        "written": datetime.fromtimestamp(info["time_ns"] / 1e9, UTC).isoformat(timespec="seconds"),
        "world": info["world"],
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "engine": {key: info["engine"][key] for key in ("steps", "skips")},
        "extra": info["extra"],
        "tensors": tensors,
    }


def _verify(folder: Path) -> int:
    """How many items were read and found right."""
    from dsx.checkpoint.info import read_info
    from dsx.checkpoint.storage import checksum, read_sums

    sums = read_sums(folder, read_info(folder)["world"])
    for (file, offset, length), expected in sums.items():
        if not (folder / file).is_file() or checksum(folder / file, offset, length) != expected:
            raise CheckpointError(
                f"{file} is damaged: {length} bytes at {offset} are not what was written", where=str(folder)
            )
    return len(sums)


def _text(found: Mapping[str, Any]) -> str:
    tensors: Mapping[str, Any] = found["tensors"]
    groups: dict[str, list[str]] = {}
    for name in tensors:
        groups.setdefault(name.split("/", 1)[0], []).append(name)
    lines = [
        f"{found['path']}",
        f"  written    {found['written']} by {found['world']} rank(s), {found['bytes'] / 1e6:.1f} MB",
        f"  updates    {found['engine']['steps']}, and {found['engine']['skips']} skipped",
    ]
    for group, names in groups.items():
        dtypes = sorted({tensors[name]["dtype"] for name in names})
        lines.append(f"  {group:10}{len(names)} tensors, {', '.join(dtypes)}")
    if "verified" in found:
        lines.append(f"  verified   {found['verified']} items, all right")
    lines += ["", *(f"  {name.split('/', 1)[1]}  {tensors[name]['shape']}" for name in groups.get("weight", ()))]
    return "\n".join(lines)
