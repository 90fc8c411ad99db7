"""Files of torch.distributed.checkpoint with a checksum for each item, read without running code.

torch's own reader loads its metadata by pickle and does not notice a flipped byte. This one accepts only the classes
that metadata is made of, no entries that are not tensors, and verifies what it reads.
"""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from dsx.checkpoint.boxes import Box, boxes
from dsx.checkpoint.disk import write_synced
from dsx.checkpoint.items import Item, buffer_for_pieces, values, write_item
from dsx.errors import CheckpointError

Sums = dict[tuple[str, int, int], int]
"""Checksums by (file, offset, length)."""

METADATA = ".metadata"
_SUFFIX = ".distcp"
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
    """Writes a rank's items one after the other, and beside them their checksums.

    torch's own keeps a copy of every item until the last one is written: a second shard in memory.

    written  is called after each item
    """

    def __init__(self, path: Path, rank: int, written: Callable[[], None]) -> None:
        super().__init__(path, sync_files=True)
        self._folder, self._rank, self._written = path, rank, written

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        name = f"{plan.storage_data.prefix}0{_SUFFIX}"
        results: list[WriteResult] = []
        sums: list[list[int]] = []
        with (self._folder / name).open("wb") as file:
            for item in plan.items:
                offset = file.tell()
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor)
                length, crc = write_item(tensor, file)
                self._written()
                results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
                sums.append([offset, length, crc])
            file.flush()
            os.fsync(file.fileno())
        write_synced(self._folder / sums_name(self._rank), json.dumps({name: sums}))
        written: Future[Any] = Future()
        written.set_result(results)
        return written


class Reader(FileSystemReader):
    """Reads items piece by piece, and verifies every one that is asked for.

    delivered  is called after each item
    """

    def __init__(self, path: Path, sums: Sums, delivered: Callable[[], None]) -> None:
        super().__init__(path)
        self._folder, self._sums, self._buffer, self._delivered = path, sums, buffer_for_pieces(), delivered
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_metadata(self._folder)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._metadata = metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._metadata is not None
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for read in plan.items:
            wanted.setdefault(read.storage_index, []).append(read)
        for name, reads in _by_name(wanted).items():
            for item, offsets in items_of(self._folder, self._metadata, name, self._sums):
                _deliver(item, reads.get(offsets, ()), planner, self._buffer)
                self._delivered()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _by_name(wanted: Mapping[MetadataIndex, list[ReadItem]]) -> dict[str, dict[tuple[int, ...], list[ReadItem]]]:
    """Reads by the tensor's name, then by the offsets of the item that they are of."""
    found: dict[str, dict[tuple[int, ...], list[ReadItem]]] = {}
    for index, reads in wanted.items():
        found.setdefault(index.fqn, {})[tuple(index.offset or ())] = reads
    return found


def _deliver(item: Item, reads: Sequence[ReadItem], planner: LoadPlanner, buffer: Tensor) -> None:
    """Copy an item, as it is read, to everyone who wants a part of it."""
    if not reads:
        return
    targets = [(read, planner.resolve_tensor(read).detach()) for read in reads]
    for start, piece in values(item, buffer):
        for box in boxes(item.sizes, start, start + piece.numel()):
            part = piece[box.begin : box.begin + box.numel].view(box.sizes)
            for read, target in targets:
                _overlap(box, part, tuple(read.storage_offsets), target)
    for read, target in targets:
        planner.commit_tensor(read, target)


def _overlap(box: Box, part: Tensor, offsets: tuple[int, ...], target: Tensor) -> None:
    """Copy what `part`, the values of `box`, has of the rectangle of `target`'s shape at `offsets`."""
    lows = [max(a, b) for a, b in zip(box.offsets, offsets, strict=True)]
    highs = [min(a + n, b + m) for a, n, b, m in zip(box.offsets, box.sizes, offsets, target.shape, strict=True)]
    if any(low >= high for low, high in zip(lows, highs, strict=True)):
        return
    here = tuple(slice(low - at, high - at) for low, high, at in zip(lows, highs, box.offsets, strict=True))
    there = tuple(slice(low - at, high - at) for low, high, at in zip(lows, highs, offsets, strict=True))
    target[there].copy_(part[here])


def items_of(folder: Path, metadata: Metadata, name: str, sums: Sums) -> list[tuple[Item, tuple[int, ...]]]:
    """(item, its offsets in the tensor) of everything that was written of a tensor."""
    entry = metadata.state_dict_metadata[name]
    assert isinstance(entry, TensorStorageMetadata)
    found = []
    for chunk in entry.chunks:
        place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        where = (place.relative_path, place.offset, place.length)
        path, crc = folder / place.relative_path, sums.get(where)
        item = Item(name, path, place.offset, place.length, tuple(chunk.sizes), entry.properties.dtype, crc)
        found.append((item, tuple(chunk.offsets)))
    return found


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


def read_sums(folder: Path, world: int) -> Sums:
    """Checksums by (file, offset, length) of everything that `world` ranks wrote."""
    found = {}
    for rank in range(world):
        path = folder / sums_name(rank)
        for file, items in (json.loads(path.read_text("utf-8")) if path.exists() else {}).items():
            found.update({(file, offset, length): crc for offset, length, crc in items})
    return found
