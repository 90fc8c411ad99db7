"""What of a checkpoint goes where, on this rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dsx.checkpoint.content import Content, Entry, own_key
from dsx.checkpoint.storage import read_metadata
from dsx.engine import Engine
from dsx.errors import CheckpointError


class Wanted:
    """What a rank reads into what, and what starts anew.

    tensors  by name in the checkpoint
    means    states of each rank's own, whose means over the old ranks are taken
    local    this rank's own tensors
    notes    for people

    Raises `CheckpointError` for a checkpoint of another model.
    """

    def __init__(self, engine: Engine, content: Content, path: Path, world: int) -> None:
        self._index, self._path = read_metadata(path).state_dict_metadata, path
        self._old, self._new = world, engine.program.transport.world
        self._anew: dict[str, int] = {}
        self.tensors: dict[str, Any] = {}
        self.means: list[Entry] = []
        known = set()
        for entry in content.entries():
            known.add(entry.key)
            self._take(entry)
        self._refuse_surplus(known)
        self.notes = [*map(self._note, self._anew)]
        self.tensors |= {key: buffer for key, buffer in content.buffers().items() if key in self._index}
        prefix = f"rank/{engine.program.transport.rank}/"
        self.local = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in self._index.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        self.tensors |= self.local

    def _take(self, entry: Entry) -> None:
        moved = entry.rank is not None and self._old != self._new
        keys = [own_key(rank, entry.state, entry.name) for rank in range(self._old)] if moved else [entry.key]
        if any(key not in self._index for key in keys) or (moved and entry.resize == "drop"):
            self._start_anew(entry)
        elif entry.held is not None:
            for key in keys:
                _check_shape(entry.name, self._index[key], entry.held.shape, self._path)
            if moved:
                self.means.append(entry)
            else:
                self.tensors[entry.key] = entry.held

    def _start_anew(self, entry: Entry) -> None:
        if entry.state == "weight":
            raise CheckpointError(f"the checkpoint has no parameter '{entry.name}'", where=str(self._path))
        self._anew[entry.state] = self._anew.get(entry.state, 0) + 1
        if entry.held is not None:
            with entry.held.held.changing() as values:
                values.zero_()

    def _note(self, state: str) -> str:
        if any(key.startswith(own_key(0, state, "")) for key in self._index):
            return f"'{state}' is each rank's own, of {self._old} ranks: on {self._new} it starts anew"
        return f"'{state}' of {self._anew[state]} parameters is not in the checkpoint: it starts anew"

    def _refuse_surplus(self, known: set[str]) -> None:
        surplus = sorted(key for key in self._index if key.startswith("weight/") and key not in known)
        if surplus:
            name = surplus[0].removeprefix("weight/")
            raise CheckpointError(
                f"the checkpoint has a parameter '{name}', which the model has not", where=str(self._path)
            )


def _check_shape(name: str, entry: Any, shape: torch.Size, path: Path) -> None:
    if entry.size != shape:
        raise CheckpointError(
            f"the parameter '{name}' has another shape in the checkpoint",
            where=str(path),
            expected=str(list(shape)),
            found=str(list(entry.size)),
        )
