"""How fast files are read, written, and both at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from dsx_kernels.aio.files import Files
from dsx_kernels.aio.memory import aligned
from dsx_kernels.aio.native import Ticket

SLAB = 8 << 20
"""Bytes of a request: what an optimizer reads for a piece of its states."""


class Speed:
    """Walks over all of some files in slabs, a few of them under way; each walk returns bytes per second.

    Files are to be written once before anything is read or timed: a disk answers for what was never written without
    reading, and takes longer to write it.
    """

    def __init__(self, files: Files) -> None:
        self._files, self._slabs = files, [aligned(SLAB) for _ in range(4)]
        for slab in self._slabs:
            slab.random_(0, 255)

    def read(self) -> float:
        """All of it, once."""
        return self._timed(lambda: self._walk(self._files.read), 1)

    def write(self) -> float:
        """All of it, once."""
        return self._timed(lambda: self._walk(self._files.write), 1)

    def update(self) -> float:
        """An optimizer's walk: each slab is read, two ahead of its turn, and written back behind it; both count."""
        return self._timed(self._update, 2)

    def _timed(self, work: Callable[[], None], times: int) -> float:
        start = time.perf_counter()
        work()
        return times * self._size / (time.perf_counter() - start)

    @property
    def _size(self) -> int:
        return self._files.size // SLAB * SLAB

    def _walk(self, transfer: Callable[..., Ticket]) -> None:
        under_way: deque[Ticket] = deque()
        for number, offset in enumerate(range(0, self._size, SLAB)):
            if len(under_way) == len(self._slabs):
                under_way.popleft().wait()
            under_way.append(transfer(offset, self._slabs[number % len(self._slabs)]))
        for ticket in under_way:
            ticket.wait()

    def _update(self) -> None:
        offsets = range(0, self._size, SLAB)
        reads = deque(self._files.read(offset, self._slabs[number]) for number, offset in enumerate(offsets[:2]))
        writes: deque[Ticket] = deque()
        for number, offset in enumerate(offsets):
            reads.popleft().wait()
            writes.append(self._files.write(offset, self._slabs[number % 4]))
            if number + 2 < len(offsets):
                if len(writes) > 2:
                    writes.popleft().wait()
                reads.append(self._files.read(offsets[number + 2], self._slabs[(number + 2) % 4]))
        for ticket in writes:
            ticket.wait()
