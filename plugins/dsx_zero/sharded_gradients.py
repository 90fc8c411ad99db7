"""Gradients of 1/N: each micro-batch's are averaged as they arrive, and added to what the store holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsx.contracts import Ballot, Bucket, Event, Flat, Handle, Scope, Shard, Side, Span, comes_back
from dsx.plugin import Context
from dsx_zero.gradients import FLIGHT, Gradients

Flying = tuple[Bucket, Handle, Callable[[], object]]
"""A bucket, its reduction, and what is done when that is there."""


class ShardedGradients(Gradients):
    """Traffic of k micro-batches: k reduce-scatters.

    Buffers for whole gradients are taken when a unit's first gradient arrives and given back when its average is there;
    they are kept for the next unit of that size, since freshly mapped memory is slow. Where it is not, none is kept
    from one window to the next. What follows a reduction, sums and inspection, runs beside backward's own work on the
    device.
    """

    def __init__(self, ctx: Context, shards: Sequence[Shard]) -> None:
        self._side = Side.of(ctx.plan.device)
        self._pool: dict[tuple[int, torch.dtype], deque[tuple[Tensor, Event]]] = {}
        self._flight: deque[Flying] = deque()
        self._filled: set[str] = set()
        self._lent: set[str] = set()
        self._squares: dict[str, Tensor] = {}
        self._sending, self._owing, self._boundary = True, False, False
        super().__init__(ctx, shards)
        self._dtypes = {bucket.slots[0].flat.key: bucket.dtype for bucket in self.reductions.buckets}

    def adopt(self, flat: Flat) -> None:
        gradient = self._transport.allocate(flat.size // self._world, self._dtypes[flat.key], self._device)
        self._store.create(flat.key, "grad", gradient)

    def _buffer(self, bucket: Bucket) -> Tensor:
        free = self._pool.get((bucket.size, bucket.dtype))
        if not free:
            return self._transport.allocate(bucket.size, bucket.dtype, self._device)
        buffer, read = free.popleft()  # the one that was given back first: its reduction has been over for longest
        read.wait()
        for start, stop in bucket.slots[0].flat.padding():
            buffer[start:stop].zero_()  # another unit's gradients
        return buffer

    def _send(self, bucket: Bucket) -> None:
        self._revoked(bucket)
        self._take_back(self._key(bucket))
        with self._side.beside():
            while len(self._flight) >= FLIGHT and not self.patient:
                self._land()
            first = self._key(bucket) not in self._filled
            self._flight.append(self._first(bucket) if first else self._another(bucket))
            if self._world == 1 and self.watcher is not None:
                self._land()

    def _first(self, bucket: Bucket) -> Flying:
        """The first average of a window goes straight to where it rests."""
        key = self._key(bucket)
        self._filled.add(key)
        grad = self._store.fetch(key, [], ["grad"])["grad"]
        whole = bucket.complete()
        handle = self._transport.reduce_scatter(grad, whole, "mean", channel="reduce", purpose="reduce")
        return bucket, handle, lambda: self._keep(key, grad)

    def _another(self, bucket: Bucket) -> Flying:
        self._store.prefetch(self._key(bucket), ["grad"])
        part, handle = self._reduce(bucket.complete())
        return bucket, handle, lambda: self._add(bucket, part)

    def _key(self, bucket: Bucket) -> str:
        (slot,) = bucket.slots
        return slot.flat.key

    def _land(self) -> None:
        """Wait for the oldest reduction, keep its average, and give its buffer back."""
        bucket, handle, keep = self._flight.popleft()
        handle.wait()
        keep()
        buffer, bucket.buffer = bucket.buffer, None
        if buffer is not None:
            free = self._pool.setdefault((bucket.size, bucket.dtype), deque())
            free.append((buffer, self._side.mark()))
        if self._boundary:
            self._final(bucket)

    def _add(self, bucket: Bucket, part: Tensor) -> None:
        key = self._key(bucket)
        filled = key in self._filled
        grad = self._store.fetch(key, *((["grad"], []) if filled else ([], ["grad"])))["grad"]
        _ = grad.add_(part) if filled else grad.copy_(part)
        self._filled.add(key)
        self._keep(key, grad)

    def _keep(self, key: str, grad: Tensor) -> None:
        """Inspect a gradient while it is at hand, if it may be the final one, and let it go to where it rests."""
        if self._boundary:
            self._squares[key] = self._guard.squares(grad)
        self._store.put(key, dirty=["grad"])

    def begin(self, boundary: bool, scope: Scope, sync: bool) -> None:
        self._scope, self._sending, self._boundary = scope, sync, boundary
        self.reductions.begin(sync)

    def end(self) -> None:
        self._owing = not self._sending
        if self._sending:
            self._reduce_all()

    def _reduce_all(self) -> None:
        self.reductions.flush()
        with self._side.beside():
            while self._flight:
                self._land()
        for free in self._pool.values():
            while len(free) > FLIGHT + 1:  # more were under way at once than usually are
                _, read = free.popleft()
                read.wait()
        self.reductions.reopen()

    def finish(self) -> Ballot:
        if self._owing:
            self._owing = False
            self._reduce_all()
        self._side.join()
        self.reductions.mend()
        self.reductions.share_order(self._device)
        ballot = self._ballot(self._squares_of(shard) for shard in self._shards)
        if comes_back(self._device):
            self._pool.clear()
        return ballot

    def _squares_of(self, shard: Shard) -> Tensor:
        if shard.key not in self._squares:  # the window was closed early
            self._squares[shard.key] = self._guard.squares(self.of(shard))
            self._give_back()
        return self._squares[shard.key]

    def of(self, shard: Shard, span: Span | None = None) -> Tensor:
        self._take_back(shard.key)
        self._lent.add(shard.key)
        return self._store.fetch(shard.key, ["grad"], span=span)["grad"]

    def _take_back(self, key: str) -> None:
        if key in self._lent:
            self._lent.remove(key)
            self._store.put(key, clean=["grad"])

    def _give_back(self) -> None:
        for key in list(self._lent):
            self._take_back(key)

    def bytes(self) -> Mapping[str, int]:
        pooled = sum(buffer.numel() * buffer.element_size() for free in self._pool.values() for buffer, _ in free)
        return {"grad": self.reductions.bytes(), "buffer": pooled}

    def reset(self) -> None:
        self._give_back()
        self._side.follow()  # the squares' memory is its own, and the vote has read them
        self._filled.clear()
        self._squares.clear()
        self.reductions.reset()
