"""Weights of a checkpoint, without ranks or model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dsx.checkpoint.series import locate
from dsx.weights.folder import Exported, Folder, Model, dtype_of
from dsx.weights.header import Spec

if TYPE_CHECKING:
    from dsx.checkpoint.archive import Archive

_KINDS = ("weight/", "buffer/")


def export(
    path: str | Path,
    out: str | Path,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int | None = None,
    *,
    overwrite: bool = False,
    begun: Callable[[int], object] = lambda size: None,
    told: Callable[[int], object] = lambda size: None,
) -> Exported:
    """Write the weights of a checkpoint as a folder that safetensors and transformers load.

    path         a checkpoint of any layout and world size, or the folder of a run: its latest
    out          the folder, which appears whole or not at all; there must be nothing in it
    dtype        float32, bfloat16 or float16 for all floating-point tensors; None: as they were trained
    shard_bytes  the most that one file holds; None: one file
    overwrite    replace an earlier export
    begun, told  called with the bytes that will be written, and with those of each piece that was

    Needs no memory for whole tensors. Raises `CheckpointError` for a checkpoint that is not whole or is damaged, and
    for a folder that cannot be written; then there is nothing in `out`.
    """
    from dsx.checkpoint.archive import Archive

    archive, wanted = Archive(locate(Path(path))), dtype_of(dtype)
    keys, model = _keys(archive), _model(archive)
    folder = Folder(Path(out), model, dtype=wanted, shard_bytes=shard_bytes, overwrite=overwrite, told=told)
    try:
        begun(sum(spec.nbytes for spec in model.cast(wanted).specs))
        for spec in model.specs:
            for start, values in archive.read(keys[spec.name]):
                folder.write(spec.name, start, values)
        return folder.finish()
    except BaseException:
        folder.abandon()
        raise


def _keys(archive: Archive) -> dict[str, str]:
    """Names in the checkpoint by those in the model."""
    return {key.partition("/")[2]: key for key in archive.tensors if key.startswith(_KINDS)}


def _model(archive: Archive) -> Model:
    """In the model's own order, where the checkpoint has it."""
    keys, about = _keys(archive), archive.info.get("model", {})
    names = [name for name in about.get("names", ()) if name in keys]
    specs = []
    for name in dict.fromkeys([*names, *keys]):
        shape, dtype = archive.tensors[keys[name]]
        specs.append(Spec(name, tuple(shape), dtype))
    return Model(specs, about)
