"""Memory for what is on its way to or from files."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import PASSED, Event, pinned
from dsx_kernels.aio import BLOCK, aligned

HUGE = 2 << 20
"""Bytes from which memory lies in huge pages, which a disk takes in one range; smaller buffers are parts of such a one:
pieces of 1 MiB moved a third slower without."""

SMALLEST_SHARE = 128 << 10
"""Bytes below which they are too few to matter."""


@frozen(eq=False)
class Unused:
    """A buffer that nobody uses, and when a device has read it."""

    memory: Tensor
    read: Event


class Buffers:
    """Page-aligned buffers that are used again; pinned where a device copies from and to them.

    kept   bytes of unused ones that are kept
    """

    def __init__(self, kept: int, device: torch.device) -> None:
        self._kept, self._device = kept, device
        self._free: list[Unused] = []
        self.bytes = 0

    def take(self, size: int) -> Tensor:
        """uint8, of `size` bytes rounded up to blocks: the smallest unused one that is not twice as large, or new."""
        size = max(-(-size // BLOCK) * BLOCK, BLOCK)
        fitting = [number for number, one in enumerate(self._free) if size <= one.memory.numel() < 2 * size]
        if fitting:
            found = self._free.pop(min(fitting, key=lambda number: self._free[number].memory.numel()))
            found.read.synchronize()
            return found.memory
        if SMALLEST_SHARE <= size < HUGE:
            return self._share(size)
        self.bytes += size
        return self._make(size)

    def _share(self, size: int) -> Tensor:
        """Part of a huge page; the other parts are unused as yet."""
        page, each = self._make(HUGE), HUGE // (HUGE // size) // BLOCK * BLOCK
        self.bytes += HUGE
        self._free.extend(Unused(page[start : start + each], PASSED) for start in range(each, HUGE, each))
        return page[:each]

    def give(self, buffer: Tensor, read: Event = PASSED) -> None:
        """Take a buffer back, which a device has read when `read` has passed; the longest unused are let go of where
        there are too many."""
        self._free.append(Unused(buffer, read))
        while _size(self._free) > self._kept:
            self._let_go(self._free.pop(0))

    def clear(self) -> None:
        """Let go of the unused ones."""
        while self._free:
            self._let_go(self._free.pop())

    def _let_go(self, unused: Unused) -> None:
        unused.read.synchronize()
        self.bytes -= unused.memory.numel()

    def _make(self, size: int) -> Tensor:
        if self._device.type == "meta":
            return torch.empty(size, dtype=torch.uint8, device="meta")
        if self._device.type == "cpu":
            return aligned(size)
        memory = pinned(size, torch.uint8, self._device)
        return memory if memory.data_ptr() % BLOCK == 0 else aligned(size)


def _size(buffers: Iterable[Unused]) -> int:
    return sum(unused.memory.numel() for unused in buffers)
