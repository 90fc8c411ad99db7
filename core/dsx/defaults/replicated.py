"""The null layout: every rank holds all parameters, gradients and states; gradients are averaged in buckets, during
backward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dsx.contracts import (
    Ballot,
    Boundary,
    Bucket,
    Handle,
    Reductions,
    Scope,
    Shard,
    Span,
    State,
    Unit,
    Watcher,
    WholeParameters,
    fill_buckets,
    logical_state,
)
from dsx.plugin import Context

BUCKET_BYTES = 25 << 20
"""As DistributedDataParallel's. Smaller units join until they are half as large: a bucket is sent when it is full, so
what is in it may as well be updated, and by a rule that communicates exchanged, in few large flats."""


FLIGHT = 2
"""Reductions that may be under way when the next begins, where somebody waits for the first."""


class Replicated(WholeParameters):
    """Parameters, gradients and states whole on every rank."""

    boundaries: frozenset[Boundary] = frozenset()

    def __init__(self, ctx: Context, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(ctx.transport, ctx.store)
        self._guard = ctx.guard
        self._rank, self._world, self._device = ctx.plan.rank, ctx.plan.world, ctx.plan.device
        self._states = {state.name: state for state in ctx.rule.states}
        self._block = ctx.rule.block
        bucket_bytes = ctx.early_bytes() or bucket_bytes
        self.units: Sequence[Unit] = ctx.flatten(limit_bytes=bucket_bytes, merge_bytes=bucket_bytes // 2)
        flats = [flat for unit in self.units for flat in unit.flats if flat.trainable]
        self.shards = [Shard(flat, 0, flat.size, flat.part(self._rank, self._world)) for flat in flats]
        buckets = fill_buckets(flats, ctx.dtypes, ctx.plan.accumulation, bucket_bytes, self._buffer)
        self._reductions = Reductions(self._transport, buckets, self._send, self._repair)
        self._handles: dict[Bucket, Handle] = {}
        self._squares: dict[Bucket, Tensor] = {}
        self._scope: Scope = "mean"
        self._sending = False
        self._by_key = {shard.key: shard for shard in self.shards}

    def watch(self, watcher: Watcher) -> None:
        super().watch(watcher)
        self.boundaries = frozenset({"enter"})

    def enter(self, unit: Unit) -> None:
        self.want(unit)

    def _buffer(self, bucket: Bucket) -> Tensor:
        return self._transport.allocate(bucket.size, bucket.dtype, self._device)

    def begin_backward(self, boundary: bool, scope: Scope, sync: bool = True) -> None:
        self.want()
        self._scope = scope
        self._sending = boundary and sync and scope == "mean"
        self._reductions.begin(self._sending)

    def gradient(self, key: str, number: int, parameter: nn.Parameter) -> None:
        self._reductions.arrived(key, number, parameter)

    def _send(self, bucket: Bucket) -> None:
        buffer = bucket.complete()
        self._handles[bucket] = self._transport.all_reduce(buffer, "mean", channel="reduce", purpose="reduce")
        if self.watcher is not None:
            self._land(FLIGHT if self._world > 1 else 0)

    def _land(self, left: int) -> None:
        """Wait for reductions, in the order of issue, until so many are under way."""
        while len(self._handles) > left:
            bucket = next(iter(self._handles))
            self._handles.pop(bucket).wait()
            if self.watcher is not None:
                for slot in bucket.slots:
                    self.watcher.final(self._by_key[slot.flat.key])

    def _repair(self, bucket: Bucket, extra: Tensor | None) -> None:
        if self.watcher is not None:
            for slot in bucket.slots:
                self.watcher.revoked(self._by_key[slot.flat.key])
        late = torch.zeros_like(bucket.memory()) if extra is None else extra
        self._transport.all_reduce(late, "mean", channel="reduce", purpose="reduce").wait()
        bucket.memory().add_(late)
        self._squares.pop(bucket, None)

    def end_backward(self) -> None:
        if self._sending:
            self._reductions.flush()
            if self.watcher is not None:
                self._land(0)

    def finish(self) -> Ballot:
        reductions = self._reductions
        if self._scope == "mean":
            reductions.flush()
            reductions.mend()
            self._land(0)
            reductions.share_order(self._device)
        words = reductions.words() if self._scope == "mean" else torch.zeros(len(reductions.buckets))
        return Ballot(self._sum_of_squares(), reductions.used(), words.double())

    def _sum_of_squares(self) -> Tensor:
        for bucket in self._reductions.buckets:
            if self._scope == "local":
                self._squares[bucket] = self._guard.squares(bucket.complete()) / self._world
            elif bucket not in self._squares:
                size = bucket.size // self._world
                owned = bucket.memory()[self._rank * size : (self._rank + 1) * size]
                self._squares[bucket] = self._guard.squares(owned)
        return torch.stack([squares.double() for squares in self._squares.values()]).sum()

    def agreed(self, used: Sequence[bool], words: Sequence[float]) -> bool:
        return self._reductions.agreed(used, words)

    def gradient_of(self, shard: Shard, span: Span | None = None) -> Tensor:
        whole = self._reductions.slot(shard.key).whole
        return whole[slice(*span)] if span else whole

    def publish(self, shard: Shard) -> None:
        """Every rank made the same update."""

    def settle(self) -> None:
        self.want()

    def reset(self) -> None:
        self._reductions.reset()
        self._squares.clear()

    def total(self, vector: Tensor) -> Tensor:
        return vector

    def bytes(self) -> Mapping[str, int]:
        return {"param": self._live_bytes(), "grad": self._reductions.bytes()}

    def logical(self, name: str) -> Iterator[tuple[str, Tensor]]:
        flats = [flat for unit in self.units for flat in unit.flats if flat.trainable or name == "weight"]
        for flat in flats:
            held = self._store.names(flat.key)
            stored = "master" if name == "weight" and "master" in held else name
            inside = stored in held
            source = self._store.fetch(flat.key, [stored])[stored] if inside else self.live[flat.key]
            state = self._states.get(name, State(name))
            parted = state.scope == "chunk"
            yield from logical_state(flat, state, source, self._transport, block=self._block, parted=parted)
            if inside:
                self._store.put(flat.key, clean=[stored])
