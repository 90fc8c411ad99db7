"""Layouts that were made before, by everything that they depend on; bounded in number and bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch
from attrs import frozen
from torch import Tensor

from dsx_kernels.block_attention import BlockLayout
from dsx_sparse.layout import layout
from dsx_sparse.pattern import Pattern
from dsx_sparse.region import Shape


@frozen
class Key:
    """All that a layout depends on.

    pattern   by its name and options
    segments  the bytes of the segment ids, whose shape the pattern's shape and the batch give
    """

    pattern: str
    shape: Shape
    segments: bytes | None
    device: torch.device


class Layouts:
    """The last layouts that were asked for, of all patterns.

    most        of them at once
    most_bytes  of their lists; the last one stays however large it is
    """

    def __init__(self, most: int = 128, most_bytes: int = 1 << 28) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[Key, BlockLayout] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()  # backward runs on threads of its own

    def get(
        self, pattern: Pattern, key: str, shape: Shape, segments: Tensor | None, device: torch.device
    ) -> BlockLayout:
        """The layout of a pattern whose name and options `key` is."""
        ids = None if segments is None else segments.detach().to("cpu", torch.int64).contiguous()
        asked = Key(key, shape, None if ids is None else ids.numpy().tobytes(), device)
        with self._lock:
            if asked in self._kept:
                self._kept.move_to_end(asked)
                return self._kept[asked]
            made = layout(shape, pattern.region(shape), ids).to(device)
            self._kept[asked] = made
            self._bytes += _size(made)
            while len(self._kept) > 1 and (len(self._kept) > self._most or self._bytes > self._most_bytes):
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= _size(dropped)
            return made

    def __len__(self) -> int:
        return len(self._kept)


def _size(made: BlockLayout) -> int:
    return sum(tensor.nbytes for tensor in made.tensors())
