"""safetensors files, written piece by piece: the library's own writer needs all tensors in memory at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from dsx.checkpoint.disk import write_synced
from dsx.errors import CheckpointError
from dsx.raw import raw
from dsx.weights.header import Spec, header

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


class File:
    """One file, whose tensors come in any order and in pieces; on disk once all bytes are there.

    Raises `OSError` where it cannot be written.
    """

    def __init__(self, path: Path, specs: Sequence[Spec], metadata: Mapping[str, str]) -> None:
        self._path, self._left = path, sum(spec.nbytes for spec in specs)
        start, self._starts = header(specs, metadata)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        try:
            self._write(memoryview(start), 0)
            self._close_if_whole()
        except OSError:
            self.close()
            raise

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Elements from `start` on of a tensor, in memory order: contiguous, of its dtype, in host memory."""
        data = raw(values)
        self._write(data, self._starts[name] + start * values.element_size())
        self._left -= len(data)
        self._close_if_whole()

    def close(self) -> None:
        """Let go of it, whole or not."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def whole(self) -> bool:
        return self._left == 0

    def _write(self, data: memoryview, at: int) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, at)
            data, at = data[written:], at + written

    def _close_if_whole(self) -> None:
        if self.whole:
            os.fsync(self._descriptor)
            self.close()


class Files:
    """Tensors as one file, or as several of at most `shard_bytes` with an index, under Hugging Face's names.

    Files are opened when their first piece comes. A tensor larger than the limit has a file of its own.
    """

    def __init__(
        self, folder: Path, specs: Sequence[Spec], metadata: Mapping[str, str], shard_bytes: int | None = None
    ) -> None:
        self._folder, self._metadata = folder, metadata
        self._parts = split(specs, shard_bytes)
        self._home = {spec.name: name for name, part in self._parts.items() for spec in part}
        self._files: dict[str, File] = {}

    def write(self, name: str, start: int, values: Tensor) -> None:
        """As `File.write`."""
        self._file(self._home[name]).write(name, start, values)

    def finish(self) -> tuple[str, ...]:
        """Names of the files, all of which are on disk."""
        missing = [name for name in self._parts if not self._file(name).whole]
        if missing:
            self.close()
            raise CheckpointError(f"not all values of {', '.join(missing)} came", where=str(self._folder))
        if len(self._parts) == 1:
            return tuple(self._parts)
        total = sum(spec.nbytes for part in self._parts.values() for spec in part)
        index = {"metadata": {"total_size": total}, "weight_map": self._home}
        write_synced(self._folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
        return (*self._parts, INDEX)

    def close(self) -> None:
        """Let go of all files, whole or not."""
        for file in self._files.values():
            file.close()

    def _file(self, name: str) -> File:
        if name not in self._files:
            self._files[name] = File(self._folder / name, self._parts[name], self._metadata)
        return self._files[name]


def split(specs: Sequence[Spec], shard_bytes: int | None) -> Mapping[str, Sequence[Spec]]:
    """Tensors by file name, in the given order, as Hugging Face cuts them."""
    full: list[Sequence[Spec]] = []
    part: list[Spec] = []
    size = 0
    for spec in specs:
        if shard_bytes is not None and spec.nbytes > shard_bytes:
            full.append([spec])
            continue
        if shard_bytes is not None and part and size + spec.nbytes > shard_bytes:
            full.append(part)
            part, size = [], 0
        part.append(spec)
        size += spec.nbytes
    if part or not full:
        full.append(part)
    if len(full) == 1:
        return {WEIGHTS: full[0]}
    stem, _, ending = WEIGHTS.partition(".")
    return {f"{stem}-{number:05d}-of-{len(full):05d}.{ending}": part for number, part in enumerate(full, 1)}
