"""Gradients that stay whole until the last micro-batch of an update; then each rank gets the average of its 1/N."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from dsx.contracts import Ballot, Bucket, Handle, Scope, Shard, Span
from dsx.plugin import Context
from dsx_zero.gradients import FLIGHT, Gradients


class WholeGradients(Gradients):
    """Traffic of an update: one reduce-scatter, whatever the number of micro-batches."""

    def __init__(self, ctx: Context, shards: Sequence[Shard]) -> None:
        super().__init__(ctx, shards)
        self._handles: deque[tuple[Bucket, Handle]] = deque()
        self._sending = False

    def _buffer(self, bucket: Bucket) -> Tensor:
        return self._transport.allocate(bucket.size, bucket.dtype, self._device)

    def _send(self, bucket: Bucket) -> None:
        _, handle = self._reduce(bucket.complete())
        self._handles.append((bucket, handle))
        if self.watcher is not None:
            self._land(FLIGHT if self._world > 1 else 0)

    def _land(self, left: int) -> None:
        """Wait for reductions, the oldest first, until so many are under way."""
        while len(self._handles) > left:
            bucket, handle = self._handles.popleft()
            handle.wait()
            self._final(bucket)

    def _add(self, bucket: Bucket, part: Tensor) -> None:
        bucket.memory()[self._own(bucket.size)].add_(part)

    def begin(self, boundary: bool, scope: Scope, sync: bool) -> None:
        self._scope, self._sending = scope, boundary and sync and scope == "mean"
        self.reductions.begin(self._sending)

    def end(self) -> None:
        if self._sending:
            self.reductions.flush()
            if self.watcher is not None:
                self._land(0)

    def finish(self) -> Ballot:
        if self._scope == "local":
            return self._local_ballot()
        self.reductions.flush()
        self.reductions.mend()
        self._land(0)
        self.reductions.share_order(self._device)
        return self._ballot(self._guard.squares(self.of(shard)) for shard in self._shards)

    def _local_ballot(self) -> Ballot:
        """The mean over ranks of their own squares: an upper bound of the average's."""
        for bucket in self.reductions.buckets:
            bucket.complete()
        ballot = self._ballot(self._guard.squares(bucket.memory()) for bucket in self.reductions.buckets)
        return Ballot(ballot.squares / self._world, ballot.used, ballot.words * 0)

    def of(self, shard: Shard, span: Span | None = None) -> Tensor:
        start, stop = span or (0, shard.stop - shard.start)
        return self.reductions.slot(shard.key).whole[shard.start + start : shard.start + stop]

    def local(self, shard: Shard) -> Tensor:
        return self.reductions.slot(shard.key).whole

    def reset(self) -> None:
        self.reductions.reset()
