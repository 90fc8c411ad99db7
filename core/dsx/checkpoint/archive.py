"""A checkpoint as tensors by name, read piece by piece, without ranks, engine or model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dsx.checkpoint.info import read_info
from dsx.checkpoint.items import PIECE, Item, buffer_for_pieces, values
from dsx.checkpoint.storage import items_of, read_metadata, read_sums
from dsx.errors import CheckpointError


class Archive:
    """The checkpoint in the folder `path`.

    piece_bytes  the most that is read at once
    info         what is no tensor
    tensors      (shape, dtype) by name, such as "weight/head.bias", in the order in which they were saved

    Raises `CheckpointError` for anything but a whole checkpoint.
    """

    def __init__(self, path: Path, piece_bytes: int = PIECE) -> None:
        self.path, self._buffer = path, buffer_for_pieces(piece_bytes)
        self.info: Mapping[str, Any] = read_info(path)
        self._metadata = read_metadata(path)
        self._sums = read_sums(path, self.info["world"])
        self.tensors: Mapping[str, tuple[torch.Size, torch.dtype]] = {
            name: (entry.size, entry.properties.dtype)
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(start, values) of a tensor in memory order, as 1-D pieces, each to be used before the next is asked for.

        Raises `CheckpointError` if it is damaged, perhaps only at its end: use nothing of it before.
        """
        shape, _ = self.tensors[name]
        at = 0
        for begin, item in self._in_order(name, shape):
            if begin != at or not _in_a_row(shape, item.sizes):
                raise self._scattered(name)
            for start, piece in values(item, self._buffer):
                yield at + start, piece
            at += math.prod(item.sizes)
        if at != shape.numel():
            raise self._scattered(name)

    def _in_order(self, name: str, shape: torch.Size) -> list[tuple[int, Item]]:
        """(place of its first element in memory order, item) of everything written of a tensor."""
        strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        placed = [
            (sum(offset * stride for offset, stride in zip(offsets, strides, strict=True)), item)
            for item, offsets in items_of(self.path, self._metadata, name, self._sums)
        ]
        return sorted(placed, key=lambda place: place[0])

    def _scattered(self, name: str) -> CheckpointError:
        return CheckpointError(
            f"what was saved of '{name}' does not follow one another in memory order",
            where=str(self.path),
            remedy="it was not written by dsx: load it with torch.distributed.checkpoint",
        )


def _in_a_row(shape: torch.Size, sizes: tuple[int, ...]) -> bool:
    """Whether a rectangle of `sizes` is contiguous in a tensor of `shape`."""
    inside = False
    for whole, size in zip(shape, sizes, strict=True):
        if inside and size != whole:
            return False
        inside = inside or size != 1
    return True
