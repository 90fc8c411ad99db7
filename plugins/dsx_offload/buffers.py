"""Memory for what is on its way to or from files."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx_kernels.aio import BLOCK, aligned


class Buffers:
    """Page-aligned buffers that are used again.

    kept   bytes of unused ones that are kept
    """

    def __init__(self, kept: int, device: torch.device) -> None:
        self._kept, self._paper = kept, device.type == "meta"
        self._free: list[Tensor] = []
        self.bytes = 0

    def take(self, size: int) -> Tensor:
        """uint8, of `size` bytes rounded up to blocks: the smallest unused one that is not twice as large, or new."""
        size = max(-(-size // BLOCK) * BLOCK, BLOCK)
        fitting = [number for number, buffer in enumerate(self._free) if size <= buffer.numel() < 2 * size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda number: self._free[number].numel()))
        self.bytes += size
        return torch.empty(size, dtype=torch.uint8, device="meta") if self._paper else aligned(size)

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back; the longest unused are let go of where there are too many."""
        self._free.append(buffer)
        while sum(unused.numel() for unused in self._free) > self._kept:
            self.bytes -= self._free.pop(0).numel()

    def clear(self) -> None:
        """Let go of the unused ones."""
        self.bytes -= sum(unused.numel() for unused in self._free)
        self._free.clear()
