"""What the stages share: every rank updates its 1/N of each flat parameter and sends it to the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from dsx.contracts import (
    Ballot,
    Boundary,
    Bucket,
    Flat,
    Handle,
    Reductions,
    Scope,
    Shard,
    Unit,
    WholeParameters,
    fill_buckets,
)
from dsx.plugin import Context


class Sharded(WholeParameters, ABC):
    """Whole parameters; optimizer states of 1/N.

    Gradients of one flat parameter are one reduction: the average of a rank's part goes to that rank. After the update
    the part travels to all, while later ones are updated, and if asked until the unit is entered again.
    """

    boundaries: frozenset[Boundary] = frozenset({"enter"})

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx.transport, ctx.store)
        self._guard = ctx.guard
        self._rank, self._world, self._device = ctx.plan.rank, ctx.plan.world, ctx.plan.device
        self._scalars = {state.name for state in ctx.rule.states if state.shape == "segment"}
        self.units: Sequence[Unit] = ctx.flatten()
        flats = [flat for unit in self.units for flat in unit.flats if flat.trainable]
        parts = [flat.part(self._rank, self._world) for flat in flats]
        self.shards = [Shard(flat, *part, part) for flat, part in zip(flats, parts, strict=True)]
        self._published: dict[str, Handle] = {}
        buckets = fill_buckets(flats, ctx.dtypes, ctx.plan.accumulation, 0, self._buffer)
        self._reductions = Reductions(self._transport, buckets, self._send, self._repair)
        self._scope: Scope = "mean"

    @abstractmethod
    def _buffer(self, bucket: Bucket) -> Tensor:
        """Memory for a bucket's gradients: [bucket.size]."""

    @abstractmethod
    def _send(self, bucket: Bucket) -> None:
        """Start the reduction of a complete bucket."""

    @abstractmethod
    def _add(self, bucket: Bucket, part: Tensor) -> None:
        """Add to the averaged gradient of this rank's part."""

    def _reduce(self, whole: Tensor) -> tuple[Tensor, Handle]:
        """Start averaging `whole`; this rank's part of it, which lies where it lay."""
        mine = whole[self._own(whole.numel())]
        return mine, self._transport.reduce_scatter(mine, whole, "mean", channel="reduce", purpose="reduce")

    def _own(self, size: int) -> slice:
        each = size // self._world
        return slice(self._rank * each, (self._rank + 1) * each)

    def _repair(self, bucket: Bucket, extra: Tensor | None) -> None:
        late = torch.zeros(bucket.size, dtype=bucket.dtype, device=self._device) if extra is None else extra
        part, handle = self._reduce(late)
        handle.wait()
        self._add(bucket, part)

    def enter(self, unit: Unit) -> None:
        for flat in unit.flats:
            self._arrive(flat.key)

    def _arrive(self, key: str) -> None:
        if (handle := self._published.pop(key, None)) is not None:
            handle.wait()

    def gradient(self, key: str, number: int, parameter: nn.Parameter) -> None:
        self._reductions.arrived(key, number, parameter)

    def _ballot(self, gradients: Iterator[Tensor]) -> Ballot:
        squares = [self._guard.squares(gradient).double() for gradient in gradients]
        return Ballot(torch.stack(squares).sum(), self._reductions.used(), self._reductions.words())

    def agreed(self, used: Sequence[bool], words: Sequence[float]) -> bool:
        return self._reductions.agreed(used, words)

    def publish(self, shard: Shard) -> None:
        live = self.live[shard.key]
        mine = live[shard.start : shard.stop]
        self._published[shard.key] = self._transport.all_gather(live, mine, channel="gather", purpose="publish")

    def settle(self) -> None:
        for key in list(self._published):
            self._arrive(key)

    def total(self, vector: Tensor) -> Tensor:
        self._transport.all_reduce(vector, "sum", channel="rule", purpose="rule").wait()
        return vector

    def logical(self, name: str) -> Iterator[tuple[str, Tensor]]:
        for unit in self.units:
            for flat in unit.flats:
                held = self._store.names(flat.key)
                stored = "master" if name == "weight" and "master" in held else name
                if stored in held:
                    yield from self._whole_state(flat, stored)
                elif name == "weight":
                    yield from ((segment.name, segment.view(self.live[flat.key])) for segment in flat.segments)

    def _whole_state(self, flat: Flat, name: str) -> Iterator[tuple[str, Tensor]]:
        """A state gathered from all ranks: in one exchange for each flat parameter."""
        mine = self._store.fetch(flat.key, [name])[name]
        whole = torch.empty(mine.numel() * self._world, dtype=mine.dtype, device=mine.device)
        self._transport.all_gather(whole, mine.contiguous(), channel="gather", purpose="state").wait()
        self._store.put(flat.key, [])
        each = flat.size // self._world
        for number, segment in enumerate(flat.segments):
            if name in self._scalars:  # every rank has all numbers; those of the parameters in its part are right
                owner = min(segment.start // each, self._world - 1)
                yield segment.name, whole.view(self._world, -1)[owner, number]
            else:
                yield segment.name, segment.view(whole)
