"""The null layout: every rank holds all parameters, gradients and states; gradients are averaged in buckets, during
backward.

A bucket is a run of flat parameters whose gradients share one buffer. It is sent when the last gradient of its
parameters has arrived, in an order that is the same on every rank: rank 0's of the first step. What arrives after its
bucket was sent (a second backward, a branch that other ranks did not take) waits in a side buffer, and the vote makes
all ranks send that bucket's rest together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from dsx.contracts import Ballot, Boundary, Flat, Handle, Scope, Shard, Unit
from dsx.plugin import Context

BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel's."""


class _Slot:
    """Gradients of one flat parameter: its part of a bucket's buffer."""

    def __init__(self, flat: Flat, bucket: _Bucket, start: int) -> None:
        self.flat, self.bucket, self.start = flat, bucket, start
        self.views = [segment.view(bucket.buffer[start : start + flat.size]) for segment in flat.segments]
        self.arrived: set[int] = set()
        self.seen = [0] * len(flat.segments)
        self.absent: set[int] = {n for n, segment in enumerate(flat.segments) if segment.start == segment.stop}

    @property
    def whole(self) -> Tensor:
        return self.bucket.buffer[self.start : self.start + self.flat.size]

    def extra(self, number: int) -> Tensor:
        """Where a gradient goes that comes after the bucket was sent."""
        if self.bucket.extra is None:
            self.bucket.extra = torch.zeros_like(self.bucket.buffer)
        return self.flat.segments[number].view(self.bucket.extra[self.start : self.start + self.flat.size])


class _Bucket:
    def __init__(self, number: int, buffer: Tensor) -> None:
        self.number, self.buffer = number, buffer
        self.slots: list[_Slot] = []
        self.handle: Handle | None = None
        self.sent = False
        self.left = 0
        self.extra: Tensor | None = None
        self.squares: Tensor | None = None

    def expect(self) -> None:
        """Count the gradients to wait for in a new backward."""
        self.left = sum(len(slot.views) - len(slot.absent) for slot in self.slots)

    def complete(self) -> None:
        """Zeros for parameters that had no gradient here: on another rank they may have had one."""
        for slot in self.slots:
            for number, view in enumerate(slot.views):
                if number not in slot.arrived:
                    view.zero_()


class Replicated:
    """Parameters, gradients and states whole on every rank."""

    boundaries: frozenset[Boundary] = frozenset()

    def __init__(self, ctx: Context, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._transport, self._guard, self._store = ctx.transport, ctx.guard, ctx.store
        self._rank, self._world = ctx.plan.rank, ctx.plan.world
        self._scalars = {state.name for state in ctx.rule.states if state.shape == "segment"}
        self.units: Sequence[Unit] = ctx.flatten(limit_bytes=bucket_bytes)
        flats = [flat for unit in self.units for flat in unit.flats if flat.trainable]
        self.shards = [Shard(flat, 0, flat.size, flat.part(self._rank, self._world)) for flat in flats]
        self._live: dict[str, Tensor] = {}
        self._slots: dict[str, _Slot] = {}
        self._buckets = self._fill_buckets(ctx, flats, bucket_bytes)
        self._parameters = sum(len(flat.segments) for flat in flats)
        self._order: list[_Bucket] = list(self._buckets)
        self._recorded: list[_Bucket] | None = []  # completion order of the first step; None once it was shared
        self._queue: deque[_Bucket] = deque()
        self._pass, self._sending, self._scope = 0, False, "mean"
        self._again: list[_Bucket] = []

    def _fill_buckets(self, ctx: Context, flats: Sequence[Flat], limit: int) -> list[_Bucket]:
        groups: list[tuple[torch.dtype, list[Flat]]] = []
        room = 0
        for flat in reversed(flats):  # the order in which backward reaches them
            dtype = ctx.dtypes.accumulate(flat.dtype, ctx.plan.accumulation)
            size = flat.size * dtype.itemsize
            if not groups or groups[-1][0] != dtype or size > room:
                groups.append((dtype, []))
                room = limit
            groups[-1][1].append(flat)
            room -= size
        buckets = []
        for number, (dtype, members) in enumerate(groups):
            buffer = ctx.transport.allocate(sum(flat.size for flat in members), dtype, ctx.plan.device)
            bucket, start = _Bucket(number, buffer), 0
            for flat in members:
                self._slots[flat.key] = _Slot(flat, bucket, start)
                bucket.slots.append(self._slots[flat.key])
                start += flat.size
            buckets.append(bucket)
        return buckets

    def adopt(self, flat: Flat, exact: Tensor) -> None:
        self._live[flat.key] = live = exact.to(flat.dtype)
        flat.attach(live)

    # No boundaries: nothing to do around units.
    def enter(self, unit: Unit) -> None: ...
    def leave(self, unit: Unit) -> None: ...
    def back(self, unit: Unit) -> None: ...
    def exit(self, unit: Unit) -> None: ...

    def begin_backward(self, boundary: bool, scope: Scope) -> None:
        self._pass += 1
        self._scope, self._sending = scope, boundary and scope == "mean"
        for bucket in self._buckets:
            bucket.expect()
        self._queue = deque(bucket for bucket in self._order if not bucket.sent)

    def gradient(self, flat: Flat, number: int, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        slot = self._slots[flat.key]
        bucket = slot.bucket
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if bucket.sent:
            slot.extra(number).add_(gradient)
        elif number in slot.arrived:
            slot.views[number].add_(gradient)
        else:
            slot.views[number].copy_(gradient)
        slot.arrived.add(number)
        if slot.seen[number] != self._pass and number not in slot.absent:
            slot.seen[number] = self._pass
            bucket.left -= 1
            if bucket.left == 0 and self._sending:
                self._completed(bucket)

    def _completed(self, bucket: _Bucket) -> None:
        if self._recorded is not None:
            self._recorded.append(bucket)
        while self._queue and self._queue[0].left <= 0:
            self._send(self._queue.popleft())

    def _send(self, bucket: _Bucket) -> None:
        bucket.complete()
        bucket.sent = True
        bucket.handle = self._transport.all_reduce(bucket.buffer, "mean", channel="reduce", purpose="reduce")

    def end_backward(self) -> None:
        if self._sending:
            self._send_rest()

    def _send_rest(self) -> None:
        for bucket in self._order:
            if not bucket.sent:
                self._send(bucket)
        self._queue.clear()

    def finish(self) -> Ballot:
        if self._scope == "mean":
            self._send_rest()
            for bucket in self._again:
                self._send_extra(bucket)
            for bucket in self._order:
                if bucket.handle is not None:
                    bucket.handle.wait()
                    bucket.handle = None
            self._share_order()
        self._again = []
        return Ballot(self._squares(), self._used(), self._words())

    def _send_extra(self, bucket: _Bucket) -> None:
        """What arrived after the bucket was sent, here or on another rank: averaged too, and added."""
        extra, bucket.extra = bucket.extra, None
        if extra is None:
            extra = torch.zeros_like(bucket.buffer)
        self._transport.all_reduce(extra, "mean", channel="reduce", purpose="reduce").wait()
        bucket.buffer.add_(extra)
        bucket.squares = None

    def _share_order(self) -> None:
        """After the first step, everyone takes the order in which rank 0's buckets became complete."""
        if self._recorded is None:
            return
        order = dict.fromkeys([*self._recorded, *self._buckets])
        self._recorded = None
        numbers = torch.tensor([bucket.number for bucket in order], device=self._buckets[0].buffer.device)
        self._transport.broadcast(numbers, channel="admin", purpose="admin").wait()
        self._order = [self._buckets[number] for number in numbers.tolist()]

    def _squares(self) -> Tensor:
        for bucket in self._buckets:
            if self._scope == "local":
                bucket.complete()
                bucket.squares = self._guard.squares(bucket.buffer) / self._world
            elif bucket.squares is None:
                size = bucket.buffer.numel() // self._world
                bucket.squares = self._guard.squares(bucket.buffer[self._rank * size : (self._rank + 1) * size])
        return torch.stack([bucket.squares.double() for bucket in self._buckets if bucket.squares is not None]).sum()

    def _used(self) -> Tensor:
        used = torch.zeros(self._parameters, dtype=torch.float64)
        for slot in self._slots.values():
            for number in slot.arrived:
                used[slot.flat.segments[number].index] = 1.0
        return used

    def _words(self) -> Tensor:
        late = [float(bucket.extra is not None and self._scope == "mean") for bucket in self._buckets]
        return torch.tensor(late, dtype=torch.float64)

    def agreed(self, used: Sequence[bool], words: Sequence[float]) -> bool:
        self._again = [bucket for bucket in self._order if words[bucket.number]]
        for slot in self._slots.values():
            segments = slot.flat.segments
            slot.absent = {n for n, part in enumerate(segments) if part.start == part.stop or not used[part.index]}
        return bool(self._again)

    def gradient_of(self, shard: Shard) -> Tensor:
        return self._slots[shard.key].whole

    def take(self, shard: Shard) -> Tensor:
        return self.gradient_of(shard).clone()

    def target(self, shard: Shard) -> Tensor:
        return self._live[shard.key]

    def publish(self, shard: Shard) -> None:
        """Every rank made the same update."""

    def settle(self) -> None:
        """Nothing travels."""

    def reset(self) -> None:
        for bucket in self._buckets:
            bucket.sent, bucket.extra, bucket.squares = False, None, None
        for slot in self._slots.values():
            slot.arrived.clear()

    def total(self, vector: Tensor) -> Tensor:
        return vector

    @contextmanager
    def gathered(self, names: Sequence[str], modify: bool) -> Iterator[None]:
        yield
        if not modify:
            return
        for shard in self.shards:
            chosen = [segment for segment in shard.flat.segments if segment.name in names]
            live = self._live[shard.key]
            for segment in chosen:
                self._transport.broadcast(live[segment.start : segment.stop], channel="admin", purpose="state").wait()
            if chosen and "master" in self._store.names(shard.key):
                master = self._store.fetch(shard.key, ["master"])["master"]
                for segment in chosen:
                    master[segment.start : segment.stop].copy_(live[segment.start : segment.stop])
                self._store.put(shard.key, ["master"])

    def resting(self, flat: Flat) -> tuple[Tensor, int]:
        return self._live[flat.key], 0

    def logical(self, name: str) -> Iterator[tuple[str, Tensor]]:
        flats = [flat for unit in self.units for flat in unit.flats if flat.trainable or name == "weight"]
        for flat in flats:
            held = self._store.names(flat.key)
            stored = "master" if name == "weight" and "master" in held else name
            inside = stored in held
            source = self._store.fetch(flat.key, [stored])[stored] if inside else self._live[flat.key]
            for number, segment in enumerate(flat.segments):
                yield segment.name, source[number] if name in self._scalars else segment.view(source)
            if inside:
                self._store.put(flat.key, [])
