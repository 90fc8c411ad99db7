"""`zero2`: optimizer states and gradients of 1/N; each micro-batch's gradients are averaged to 1/N as they arrive."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from dsx.contracts import Ballot, Bucket, Flat, Handle, Scope, Shard
from dsx.plugin import Context, Descriptor, Fill, Part, hook
from dsx_zero.layout import Sharded

FLIGHT = 2
"""Reductions under way at once: their whole buffers are what this stage holds beside its shards."""


class Zero2(Sharded):
    """Traffic of k micro-batches: k reduce-scatters and one all-gather, (k + 1)/2 of data parallelism's.

    Buffers for whole gradients are taken when a unit's first gradient arrives and given back when its average is there;
    they are kept for the next unit of that size, since freshly mapped memory is slow.
    """

    def __init__(self, ctx: Context) -> None:
        self._pool: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        self._flight: deque[tuple[Bucket, Tensor, Handle]] = deque()
        self._filled: set[str] = set()
        self._lent: set[str] = set()
        super().__init__(ctx)
        self._dtypes = {bucket.slots[0].flat.key: bucket.dtype for bucket in self._reductions.buckets}

    def adopt(self, flat: Flat, exact: Tensor) -> None:
        super().adopt(flat, exact)
        if flat.trainable:
            size = flat.size // self._world
            gradient = self._transport.allocate(size, self._dtypes[flat.key], self._device)
            self._store.create(flat.key, "grad", gradient)

    def _buffer(self, bucket: Bucket) -> Tensor:
        free = self._pool.get((bucket.size, bucket.dtype))
        return free.pop() if free else self._transport.allocate(bucket.size, bucket.dtype, self._device)

    def _send(self, bucket: Bucket) -> None:
        while len(self._flight) >= FLIGHT:
            self._land()
        part, handle = self._reduce(bucket.complete())
        self._flight.append((bucket, part, handle))

    def _land(self) -> None:
        """Wait for the oldest reduction, keep its average, and give its buffer back."""
        bucket, part, handle = self._flight.popleft()
        handle.wait()
        self._add(bucket, part)
        if (buffer := bucket.buffer) is not None:
            self._pool.setdefault((bucket.size, bucket.dtype), []).append(buffer)
            bucket.buffer = None

    def _add(self, bucket: Bucket, part: Tensor) -> None:
        key = bucket.slots[0].flat.key
        self._store.add(key, "grad", part, first=key not in self._filled)
        self._filled.add(key)

    def begin_backward(self, boundary: bool, scope: Scope) -> None:
        self._scope = scope
        self._reductions.begin(sending=True)

    def end_backward(self) -> None:
        self._reductions.flush()
        while self._flight:
            self._land()
        self._reductions.reopen()

    def finish(self) -> Ballot:
        self._reductions.mend()
        self._reductions.share_order(self._device)
        ballot = self._ballot(self.gradient_of(shard) for shard in self.shards)
        self._give_back()
        return ballot

    def gradient_of(self, shard: Shard) -> Tensor:
        self._lent.add(shard.key)
        return self._store.fetch(shard.key, ["grad"])["grad"]

    def _give_back(self) -> None:
        for key in self._lent:
            self._store.put(key, [])
        self._lent.clear()

    def take(self, shard: Shard) -> Tensor:
        return self.gradient_of(shard).clone()

    def reset(self) -> None:
        self._give_back()
        self._filled.clear()
        self._reductions.reset()


descriptor = Descriptor(
    name="zero2",
    section="partition",
    contract=1,
    fills={"layout": Fill(offers={"parameter.whole"})},
    summary="ZeRO stage 2: optimizer states and gradients sharded",
)


@hook
def dsx_partition() -> list[Part]:
    return [Part("layout", Zero2)]
