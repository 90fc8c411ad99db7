"""The tier of files."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch
from attrs import define
from torch import Tensor

from dsx.contracts import Event, Kind, Span, Tier
from dsx_kernels.aio import BLOCK, PIECE, Files, Ticket
from dsx_offload.buffers import Buffers
from dsx_offload.claims import Claims
from dsx_offload.extents import Extent, Region, blocks
from dsx_offload.lending import Lending

WINDOW = 32 << 20
"""Bytes that may have been read before they are asked for, and as many that may be on their way back: some ten
milliseconds of a disk's work. No more than all states have: those of one update."""


SECOND = "second values"
"""What they are called in plans."""

LUMP = 64 << 20
"""Bytes of files for states that nobody has announced."""


@define(eq=False)
class Held:
    """Blocks in memory, and the transfer that they are waiting for; None: none, or done."""

    region: Region
    buffer: Tensor
    ticket: Ticket | None

    def wait(self) -> None:
        if self.ticket is not None:
            self.ticket.wait()

    def done(self) -> bool:
        return self.ticket is None or self.ticket.done()


Place = tuple[str, str]


class FileTier(Tier):
    """States in files, brought near in parts.

    open_files   makes files of so many bytes
    room         bytes free where they will lie
    piece_bytes  of a part of a state
    """

    place = "disk"
    alternates = True

    def __init__(
        self,
        claims: Claims,
        device: torch.device,
        *,
        open_files: Callable[[int], Files],
        room: Callable[[], int],
        update: str,
        piece_bytes: int,
    ) -> None:
        super().__init__()
        self._claims, self._device, self._open, self._room = claims, device, open_files, room
        self._paper, self._piece = device.type == "meta", piece_bytes
        self._lending = Lending(device, on_device=update == "device")
        self._files: list[Files] = []
        self._end = self._size = 0
        self._extents: dict[Place, Extent] = {}
        self._second: dict[Place, Extent] = {}
        self._aside: set[Place] = set()
        self._buffers = Buffers(2 * WINDOW, device)
        self._coming: dict[Place, list[Held]] = {}
        self._borrowed: dict[Place, list[Held]] = {}
        self._writing: deque[Held] = deque()
        self._ahead = self._behind = self._window = 0
        self._lock = threading.Lock()

    # ---- set-up

    def claims(self, name: str, size: int) -> bool:
        return self._claims.take(name, size)

    def idle(self) -> str | None:
        return self._claims.idle()

    def room(self) -> int | None:
        return self._room()

    def footprint(self) -> int:
        return self._end

    def reserve(self, size: int) -> None:
        if not self._paper:
            self._files.append(self._open(size))
        self._end, self._size = 0, size

    def create(self, key: str, name: str, tensor: Tensor) -> None:
        kind = Kind(tensor.numel(), tensor.dtype)
        self._extents[key, name] = extent = self._place(kind)
        self._window = min(WINDOW, self._window + blocks(kind.bytes))
        if extent.files is not None:
            each = max(1, WINDOW // kind.dtype.itemsize)
            for start in range(0, kind.size, each):
                part = tensor[start : start + each].cpu().contiguous()
                extent.files.write(extent.offset + start * kind.dtype.itemsize, part).wait()

    def _place(self, kind: Kind) -> Extent:
        size = blocks(kind.bytes)
        start = -(-self._end // PIECE) * PIECE if size >= PIECE else self._end  # else it would be cut once more
        if not self._paper and start + size > self._size:  # made after set-up
            self.reserve(max(size, LUMP))
            start = 0
        self._end = start + size
        return Extent(self._files[-1] if self._files else None, start, kind)

    def names(self, key: str) -> Sequence[str]:
        return [name for owner, name in self._extents if owner == key]

    def kind(self, key: str, name: str) -> Kind:
        return self._extents[key, name].kind

    def grain(self, key: str) -> int | None:
        widest = max(self.kind(key, name).dtype.itemsize for name in self.names(key))
        return max(BLOCK, self._piece // widest // BLOCK * BLOCK)

    # ---- walking

    def prefetch(self, key: str, read: Sequence[str], span: Span | None = None) -> None:
        with self._lock:
            for name in read:
                region = self._extents[key, name].region(span)
                here = (*self._coming.get((key, name), ()), *self._borrowed.get((key, name), ()))
                full = self._ahead and self._ahead + region.size > WINDOW
                if full or any(held.region.overlaps(region) for held in here):
                    continue
                if any(held.region.overlaps(region) and not held.done() for held in self._writing):
                    continue
                self._ahead += region.size
                self._coming.setdefault((key, name), []).append(self._start_reading(region))

    def fetch(
        self,
        key: str,
        read: Sequence[str] = (),
        write: Sequence[str] = (),
        into: Tensor | None = None,
        span: Span | None = None,
    ) -> dict[str, Tensor]:
        regions = {name: self._extents[key, name].region(span) for name in (*read, *write)}
        self._wait_for_writes(regions.values())
        with self._lock:
            held = {name: self._take((key, name), region, name in read) for name, region in regions.items()}
        for one in held.values():
            one.wait()
        if into is not None:
            ((name, one),) = held.items()
            into.copy_(one.region.view(one.buffer), non_blocking=True)
            self._give_back((key, name), Event.now(into.device))
            return {}
        return {
            name: self._lending.lend(key, name, one.region.view(one.buffer), name in read) for name, one in held.items()
        }

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        for name in clean:
            self._give_back((key, name), self._lending.take_back(key, name, dirty=False))
        homes = [self._lending.take_back(key, name, dirty=True) for name in dirty]
        for home in homes:
            home.synchronize()
        with self._lock:
            changed = [(name, held) for name in dirty for held in self._borrowed.pop((key, name), ())]
            for name, held in changed:
                if (key, name) in self._aside:
                    held.region = held.region.within(self._second[key, name])
                else:
                    self._drop_old((key, name), held.region)
                self._start_writing(held)
        self._finish_writing(self._window)

    # ---- second values

    def alternate(self, key: str, names: Sequence[str]) -> bool:
        for name in names:
            self._second[key, name] = self._place(self.kind(key, name))
        return True

    def aside(self, key: str, names: Sequence[str]) -> None:
        self._wait_for_writes(self._second[key, name].region(None) for name in names)  # of one that was forgotten
        self._aside.update((key, name) for name in names)

    def keep(self, key: str, names: Sequence[str]) -> None:
        with self._lock:
            for place in ((key, name) for name in names):
                self._drop_old(place, self._extents[place].region(None))
                self._extents[place], self._second[place] = self._second[place], self._extents[place]
                self._aside.discard(place)

    def forget(self, key: str, names: Sequence[str]) -> None:
        self._aside.difference_update((key, name) for name in names)

    def drain(self) -> None:
        self._finish_writing(0)

    def close(self) -> None:
        try:
            self.drain()
        finally:
            for files in self._files:
                files.close()
            self._files.clear()
            self._extents.clear()
            self._second.clear()
            self._coming.clear()
            self._buffers.clear()

    def bytes(self) -> dict[str, int]:
        held: dict[str, int] = {}
        for (_, name), extent in self._extents.items():
            held[name] = held.get(name, 0) + extent.kind.bytes
        if second := sum(extent.kind.bytes for extent in self._second.values()):
            held[SECOND] = second
        return held

    def buffers(self) -> int:
        return self._buffers.bytes

    def traffic(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        counts = [files.counts for files in self._files]
        return sum(count.bytes_read for count in counts), sum(count.bytes_written for count in counts)

    # ---- what is under way

    def _give_back(self, place: Place, read: Event) -> None:
        with self._lock:
            for held in self._borrowed.pop(place, ()):
                self._buffers.give(held.buffer, read)

    def _take(self, place: Place, region: Region, read: bool) -> Held:
        """Blocks for a borrower, perhaps already on their way."""
        coming = self._coming.get(place, [])
        held = next((one for one in coming if (one.region.start, one.region.stop) == (region.start, region.stop)), None)
        if held is not None:
            coming.remove(held)
            self._ahead -= region.size
        elif read or region.ragged:  # what is only written keeps its neighbours in the same block
            held = self._start_reading(region)
        else:
            held = Held(region, self._buffers.take(region.size), None)
        self._borrowed.setdefault(place, []).append(held)
        return held

    def _start_reading(self, region: Region) -> Held:
        buffer, extent = self._buffers.take(region.size), region.extent
        if extent.files is None:
            return Held(region, buffer, None)
        return Held(region, buffer, extent.files.read(extent.offset + region.low, buffer[: region.size]))

    def _start_writing(self, held: Held) -> None:
        region, extent = held.region, held.region.extent
        if extent.files is not None:
            held.ticket = extent.files.write(extent.offset + region.low, held.buffer[: region.size])
        self._writing.append(held)
        self._behind += region.size

    def _drop_old(self, place: Place, region: Region) -> None:
        """What was read before it was changed."""
        for old in [held for held in self._coming.get(place, ()) if held.region.overlaps(region)]:
            self._coming[place].remove(old)
            self._ahead -= old.region.size
            old.wait()
            self._buffers.give(old.buffer)

    def _wait_for_writes(self, regions: Iterable[Region]) -> None:
        """A block is read only once it has been written."""
        wanted = tuple(regions)
        with self._lock:
            pending = [held for held in self._writing if any(held.region.overlaps(region) for region in wanted)]
        for held in pending:
            held.wait()

    def _finish_writing(self, limit: int) -> None:
        """Wait until no more than `limit` bytes are on their way to files; the oldest first. Raises what failed."""
        while True:
            with self._lock:
                if self._behind <= limit or not self._writing:
                    return
                oldest = self._writing[0]
            try:
                oldest.wait()
            finally:
                with self._lock:
                    if oldest in self._writing:
                        self._writing.remove(oldest)
                        self._behind -= oldest.region.size
                        self._buffers.give(oldest.buffer)
