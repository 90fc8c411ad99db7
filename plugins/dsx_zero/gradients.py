"""What the stages share of gradients: arrival, the fixed order of reductions, and what the vote hears of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dsx.contracts import Ballot, Bucket, Flat, Handle, Reductions, Scope, Shard, Span, Watcher, fill_buckets
from dsx.plugin import Context

FLIGHT = 2
"""Reductions under way at once, where they are waited for during backward."""


class Gradients(ABC):
    """Gradients of trainable flat parameters, one bucket for each: after a reduction a rank has the average of its
    1/N."""

    patient = False
    """Whether reductions must not be waited for before the backward is over: ranks that reach parameters in different
    orders, or not at all, could each wait for what another has not come to."""

    watcher: Watcher | None = None
    """Who wants to know when a gradient is final."""

    def __init__(self, ctx: Context, shards: Sequence[Shard]) -> None:
        self._transport, self._store, self._guard = ctx.transport, ctx.store, ctx.guard
        self._rank, self._world, self._device = ctx.plan.rank, ctx.plan.world, ctx.plan.device
        self._shards, self._by_key = shards, {shard.key: shard for shard in shards}
        flats = [shard.flat for shard in shards]
        buckets = fill_buckets(flats, ctx.dtypes, ctx.plan.accumulation, 0, self._buffer)
        self.reductions = Reductions(self._transport, buckets, self._send, self._repair)
        self._scope: Scope = "mean"

    @abstractmethod
    def begin(self, boundary: bool, scope: Scope, sync: bool) -> None:
        """A backward starts; without `sync`, its gradients stay whole."""

    @abstractmethod
    def end(self) -> None:
        """It is over."""

    @abstractmethod
    def finish(self) -> Ballot:
        """The window's gradients are final."""

    @abstractmethod
    def of(self, shard: Shard, span: Span | None = None) -> Tensor:
        """The final gradient [stop - start] or a part of it, borrowed until it is asked for again, or `reset`."""

    def local(self, shard: Shard) -> Tensor:
        """This rank's own gradient of the whole flat parameter [size], where gradients stay whole."""
        raise NotImplementedError

    @abstractmethod
    def reset(self) -> None:
        """Forget them."""

    @abstractmethod
    def _buffer(self, bucket: Bucket) -> Tensor:
        """Memory for a bucket's gradients: [bucket.size]."""

    @abstractmethod
    def _send(self, bucket: Bucket) -> None:
        """Start the reduction of a complete bucket."""

    @abstractmethod
    def _add(self, bucket: Bucket, part: Tensor) -> None:
        """Add to the averaged gradient of this rank's part."""

    def adopt(self, flat: Flat) -> None:
        """A trainable flat parameter has its weights: make what it needs besides."""
        return

    def arrived(self, key: str, number: int, parameter: nn.Parameter) -> None:
        """Take a gradient out of `parameter.grad`."""
        self.reductions.arrived(key, number, parameter)

    def bytes(self) -> Mapping[str, int]:
        """Bytes held now beside the store's."""
        return {"grad": self.reductions.bytes()}

    def agreed(self, used: Sequence[bool], words: Sequence[float]) -> bool:
        """What the vote said."""
        return self.reductions.agreed(used, words)

    def _reduce(self, whole: Tensor) -> tuple[Tensor, Handle]:
        """Start averaging `whole`; this rank's part of it, which lies where it lay."""
        mine = whole[self._own(whole.numel())]
        return mine, self._transport.reduce_scatter(mine, whole, "mean", channel="reduce", purpose="reduce")

    def _own(self, size: int) -> slice:
        each = size // self._world
        return slice(self._rank * each, (self._rank + 1) * each)

    def _final(self, bucket: Bucket) -> None:
        if self.watcher is not None:
            self.watcher.final(self._by_key[bucket.slots[0].flat.key])

    def _revoked(self, bucket: Bucket) -> None:
        if self.watcher is not None:
            self.watcher.revoked(self._by_key[bucket.slots[0].flat.key])

    def _repair(self, bucket: Bucket, extra: Tensor | None) -> None:
        self._revoked(bucket)
        late = torch.zeros(bucket.size, dtype=bucket.dtype, device=self._device) if extra is None else extra
        part, handle = self._reduce(late)
        handle.wait()
        self._add(bucket, part)

    def _ballot(self, squares: Iterable[Tensor]) -> Ballot:
        total = torch.stack([number.double() for number in squares]).sum()
        return Ballot(total, self.reductions.used(), self.reductions.words())
