"""Whole parameters that come and go: the buffers of units whose shards rest in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsx.contracts import Channel, Event, Flat, Handle, Side, Store, Transport, Unit, memory_of
from dsx_zero.released import release, restore
from dsx_zero.rooms import Mapped, Pool, Resized, Room, mappable

SMALLEST_MAPPED = 1 << 16
"""Bytes below which a heap leaves no hole worth the call."""


class Residence:
    """Buffers of a fixed address in the model, with memory behind them only while a unit is live.

    The parameters stay views of their buffer, whose memory is taken away and put back, so that what autograd saved is
    valid whenever the unit is live. What fills them runs beside the model's own work on the device.

    want       is called before this rank's part of a unit is read
    busy       how often a unit is in use: between enter and leave, which may nest, or back and exit
    permanent  units that stay live from one update to the next
    """

    def __init__(
        self,
        units: Sequence[Unit],
        transport: Transport,
        store: Store,
        rank: int,
        world: int,
        device: torch.device,
        want: Callable[[Unit], None] = lambda unit: None,
    ) -> None:
        self._want = want
        self._units, self._transport, self._store = units, transport, store
        self._rank, self._world = rank, world
        self._side = Side.of(device)
        self._whole: dict[str, Tensor] = {}
        self._rooms: dict[str, Room] = {}
        self._pool: Pool | None = None
        self._owners: dict[int, int] = {}
        self._live: set[int] = set()
        self._coming: dict[int, tuple[Handle, Event]] = {}
        self._pins: Counter[int] = Counter()
        self.busy: Counter[int] = Counter()
        self.permanent: frozenset[int] = frozenset()

    def adopt(self, flat: Flat, exact: Tensor) -> None:
        """Keep this rank's part of the weights in the store, as `param`, and make the parameters views of an empty
        buffer."""
        start, stop = flat.part(self._rank, self._world)
        self._store.create(flat.key, "param", exact[start:stop].to(flat.dtype, copy=True))
        self._whole[flat.key] = whole = self._make(flat, exact.device)
        flat.attach(whole)
        self._empty(flat)

    def _make(self, flat: Flat, device: torch.device) -> Tensor:
        size = flat.size * flat.dtype.itemsize
        if not mappable(device) or size < SMALLEST_MAPPED:
            whole = torch.empty(flat.size, dtype=flat.dtype, device=device)
            self._rooms[flat.key] = Resized(whole)
            return whole
        self._pool = self._pool or Pool()
        self._rooms[flat.key] = room = Mapped(self._pool, size)
        return room.tensor(flat.size, flat.dtype)

    def live(self, number: int) -> bool:
        """Whether the unit's parameters can be read, and nothing is on its way for it."""
        return (number in self._live and number not in self._coming) or not self._units[number].flats

    def filled(self, flat: Flat) -> bool:
        """Whether the buffer of a flat parameter has its weights, or is about to."""
        return memory_of(self._whole[flat.key]) in self._owners

    def whole(self, flat: Flat) -> Tensor:
        """The buffer of a live flat parameter: [size]."""
        return self._whole[flat.key]

    def owner(self, memory: int) -> int | None:
        """The live unit whose memory has this number, of `memory_of`."""
        return self._owners.get(memory)

    def bytes(self) -> int:
        """Bytes held by buffers now."""
        return sum(room.bytes() for room in self._rooms.values())

    def gather(self, number: int, channel: Channel = "gather") -> None:
        """Start bringing a unit; into its place, if it is live: the weights are the same."""
        self._want(self._units[number])
        handles = [self._coming.pop(number)[0]] if number in self._coming else []
        flats = self._units[number].flats
        for flat in flats:  # memory is taken in the model's own stream, which is also the one that is done with it
            self._rooms[flat.key].fill()
            self._owners[memory_of(self._whole[flat.key])] = number
        with self._side.beside():
            for flat in flats:
                whole = self._whole[flat.key]
                start, stop = flat.part(self._rank, self._world)
                self._store.fetch(flat.key, ["param"], into=whole[start:stop])
                handles.append(self._transport.all_gather(whole, whole[start:stop], channel=channel, purpose="gather"))
        self._coming[number] = Handle(handles), self._side.mark()

    def foresee(self, number: int) -> None:
        """It is gathered next: start bringing this rank's part near, where that rests elsewhere."""
        for flat in self._units[number].flats:
            self._store.prefetch(flat.key, ["param"])

    def arrive(self, number: int) -> None:
        """Wait until it is live."""
        if (coming := self._coming.pop(number, None)) is not None:
            handle, copied = coming
            handle.wait()
            copied.wait()
            self._live.add(number)
            for flat in self._units[number].flats:
                restore(flat)

    def drop(self, number: int) -> None:
        """Take what was brought for a use that this rank skips, and let it go."""
        self.arrive(number)
        self.release(number)

    def release(self, number: int) -> None:
        """Give the memory back, unless the unit is in use, or on its way for a later use."""
        if self.busy[number] or number in self._coming or number in self.permanent or self._pins[number]:
            return
        for flat in self._units[number].flats:
            self._empty(flat)
        self._live.discard(number)

    def _empty(self, flat: Flat) -> None:
        release(flat)
        self._owners.pop(memory_of(self._whole[flat.key]), None)
        self._rooms[flat.key].empty()

    def clear(self) -> None:
        """Nothing is in use any more."""
        self.busy.clear()
        for number in list(self._coming):
            self.arrive(number)
        for number in list(self._live):
            self.release(number)

    def pin(self, number: int) -> None:
        """Keep it live until `unpin`; may nest."""
        self._pins[number] += 1

    def unpin(self, number: int) -> None:
        """One `pin` less; it is not released by this."""
        self._pins[number] -= 1
