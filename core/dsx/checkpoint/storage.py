"""Files of torch.distributed.checkpoint with a checksum for each item, read without running code.

torch's own reader loads its metadata by pickle and does not notice a flipped byte. This one accepts only the classes
that metadata is made of, no entries that are not tensors, and verifies what it reads.
"""

from __future__ import annotations

import json
import pickle
import zlib
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.futures import Future

from dsx.checkpoint.disk import write_synced
from dsx.errors import CheckpointError

METADATA = ".metadata"
_BLOCK = 8 << 20
_ALLOWED = {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
        "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    *(("torch", name) for name in (
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32",
        "uint64", "bool", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2",
    )),
}  # fmt: skip


def sums_name(rank: int) -> str:
    """The file with the checksums of what `rank` wrote."""
    return f"__{rank}.sums.json"


class Writer(FileSystemWriter):
    """Writes a rank's items, and beside them their checksums."""

    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path, sync_files=True)
        self._folder, self._rank = path, rank

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        written = super().write_data(plan, planner)
        sums: dict[str, list[list[int]]] = {}
        for result in written.value():
            place = result.storage_data
            crc = checksum(self._folder / place.relative_path, place.offset, place.length)
            sums.setdefault(place.relative_path, []).append([place.offset, place.length, crc])
        write_synced(self._folder / sums_name(self._rank), json.dumps(sums))
        return written


class Reader(FileSystemReader):
    """Verifies every item that is asked for before its values are used."""

    def __init__(self, path: Path, sums: dict[tuple[str, int, int], int]) -> None:
        super().__init__(path)
        self._folder, self._sums = path, sums

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self._folder)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for index in dict.fromkeys(item.storage_index for item in plan.items):
            place = self.storage_data[index]
            self._verify(index.fqn, place.relative_path, place.offset, place.length)
        return super().read_data(plan, planner)

    def _verify(self, name: str, file: str, offset: int, length: int) -> None:
        path, expected = self._folder / file, self._sums.get((file, offset, length))
        if not path.is_file():
            raise CheckpointError(f"the checkpoint lacks its file {file}", where=str(self._folder))
        if path.stat().st_size < offset + length:
            raise CheckpointError(
                f"the file {file} of the checkpoint is cut short",
                where=str(self._folder),
                expected=f"at least {offset + length} bytes",
                found=f"{path.stat().st_size} bytes",
            )
        if expected is None or checksum(path, offset, length) != expected:
            raise CheckpointError(
                f"'{name}' in the checkpoint is damaged: its checksum does not match",
                where=f"{path}, {length} bytes at {offset}",
                remedy="resume from another checkpoint: --resume PATH",
            )


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise CheckpointError(
                f"the checkpoint's metadata names {module}.{name}, which no checkpoint needs",
                remedy="it may have been made to run code: do not use it",
            )
        return super().find_class(module, name)


def read_metadata(folder: Path) -> Metadata:
    """The index of a checkpoint's tensors. Raises `CheckpointError` for anything but an index of tensors."""
    path = folder / METADATA
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError("the checkpoint has no metadata: it was never finished", where=str(folder)) from None
    except Exception as error:
        raise CheckpointError(f"the checkpoint's metadata cannot be read: {error}", where=str(path)) from error
    if not isinstance(found, Metadata):
        raise CheckpointError("the checkpoint's metadata is something else", where=str(path))
    odd = [name for name, entry in found.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    if odd:
        raise CheckpointError(
            f"the checkpoint has entries that are no tensors: {', '.join(odd[:3])}",
            where=str(folder),
            remedy="it was not written by dsx; entries of that kind would be unpickled, which could run code",
        )
    return found


def checksum(path: Path, offset: int, length: int) -> int:
    """CRC-32 of a range of a file."""
    crc = 0
    with path.open("rb") as file:
        file.seek(offset)
        while length and (block := file.read(min(_BLOCK, length))):
            crc, length = zlib.crc32(block, crc), length - len(block)
    return crc


def read_sums(folder: Path, world: int) -> dict[tuple[str, int, int], int]:
    """Checksums by (file, offset, length) of everything that `world` ranks wrote."""
    found = {}
    for rank in range(world):
        path = folder / sums_name(rank)
        for file, items in (json.loads(path.read_text("utf-8")) if path.exists() else {}).items():
            found.update({(file, offset, length): crc for offset, length, crc in items})
    return found
