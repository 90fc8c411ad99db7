"""What one rank wrote of one tensor: a range of a file, in the form of `torch.save`, with a checksum."""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import torch
from attrs import frozen
from torch import Tensor

from dsx.errors import CheckpointError
from dsx.raw import alone, raw

PIECE = 16 << 20
"""Bytes of a tensor that are in memory at once."""

_BLOCK = 8 << 20


@frozen
class Item:
    """Where an item is.

    name            of the tensor, for messages
    path            the file
    offset, length  in bytes
    sizes, dtype    of its values
    crc             what its checksum should be; None if none was recorded
    """

    name: str
    path: Path
    offset: int
    length: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    crc: int | None


def write_item(tensor: Tensor, file: IO[bytes]) -> tuple[int, int]:
    """Append a tensor; (bytes written, their checksum). Of a tensor in host memory nothing is copied."""
    summed = _Summed(file)
    held = tensor.detach().to("cpu").contiguous()
    torch.save(alone(held), cast(IO[bytes], summed))
    return summed.length, summed.crc


def buffer_for_pieces(size: int = PIECE) -> Tensor:
    """Memory for `values`: uint8 [size]."""
    return torch.empty(size, dtype=torch.uint8)


def values(item: Item, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    """(start, values) of an item in memory order, as 1-D pieces no larger than `buffer`.

    A piece may lie in `buffer`, and is there until the next one is asked for.
    Raises `CheckpointError` if it is missing, cut short or damaged: of an item larger than a piece only at its end, so
    what was read must not be used before.
    """
    size = math.prod(item.sizes) * item.dtype.itemsize
    try:
        with item.path.open("rb") as file:
            _check_length(item, os.fstat(file.fileno()).st_size)
            file.seek(item.offset)
            if size <= buffer.numel():
                yield 0, _whole(item, file.read(item.length))
            else:
                yield from _streamed(item, file, size, buffer)
    except FileNotFoundError:
        raise CheckpointError(f"the checkpoint lacks its file {item.path.name}", where=str(item.path.parent)) from None
    except OSError as error:
        raise CheckpointError(f"'{item.path}' cannot be read: {error.strerror or error}") from error


def _whole(item: Item, data: bytes) -> Tensor:
    if zlib.crc32(data) != item.crc:
        raise _damaged(item)
    try:
        found: Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return found.reshape(-1)
    except Exception as error:
        raise _damaged(item) from error


def _streamed(item: Item, file: IO[bytes], size: int, buffer: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Read an item once, for its values and its checksum."""
    begin, width = _data(item, file, size), item.dtype.itemsize
    crc = _skip(file, item.offset, begin, 0)
    each = buffer.numel() // width * width
    for start in range(0, size, each):
        part = buffer[: min(each, size - start)]
        memory = raw(part)
        if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
            raise _damaged(item)
        crc = zlib.crc32(memory, crc)
        yield start // width, part.view(item.dtype)
    if _skip(file, begin + size, item.offset + item.length, crc) != item.crc:
        raise _damaged(item)


def _skip(file: IO[bytes], start: int, stop: int, crc: int) -> int:
    """The checksum continued over bytes [start, stop) of the file, which is at `stop` then."""
    file.seek(start)
    while start < stop and (block := file.read(min(_BLOCK, stop - start))):
        crc, start = zlib.crc32(block, crc), start + len(block)
    return crc


def _data(item: Item, file: IO[bytes], size: int) -> int:
    """Where in the file the values begin: `torch.save` writes a zip archive and does not compress it."""
    try:
        with zipfile.ZipFile(_Window(file, item.offset, item.length)) as archive:
            (entry,) = [entry for entry in archive.infolist() if entry.filename.endswith("/data/0")]
    except (zipfile.BadZipFile, ValueError) as error:
        raise _damaged(item) from error
    file.seek(item.offset + entry.header_offset)
    header = file.read(30)
    begin = item.offset + entry.header_offset + 30 + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    if entry.file_size != size or entry.compress_type != zipfile.ZIP_STORED or begin + size > item.offset + item.length:
        raise _damaged(item)
    return begin


def _check_length(item: Item, found: int) -> None:
    if found < item.offset + item.length:
        raise CheckpointError(
            f"the file {item.path.name} of the checkpoint is cut short",
            where=str(item.path.parent),
            expected=f"at least {item.offset + item.length} bytes",
            found=f"{found} bytes",
        )


def _damaged(item: Item) -> CheckpointError:
    return CheckpointError(
        f"'{item.name}' in the checkpoint is damaged: its checksum does not match",
        where=f"{item.path}, {item.length} bytes at {item.offset}",
        remedy="use another checkpoint: --resume PATH",
    )


class _Summed(io.RawIOBase):
    """A file that counts and sums what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.length, self.crc = file, 0, 0

    def write(self, data: bytes) -> int:  # type: ignore[override]
        self.crc = zlib.crc32(data, self.crc)
        written = self._file.write(data)
        self.length += written
        return written

    def flush(self) -> None:
        """The file is flushed when it is whole."""


class _Window(io.RawIOBase):
    """A range of a file, as a file of its own."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("a place before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data
