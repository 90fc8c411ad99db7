"""`zero1`: optimizer states of 1/N; gradients whole until the last micro-batch of an update, then averaged to 1/N."""

from __future__ import annotations

from torch import Tensor

from dsx.contracts import Ballot, Bucket, Handle, Scope, Shard
from dsx.plugin import Context, Descriptor, Fill, Part, hook
from dsx_zero.layout import Sharded


class Zero1(Sharded):
    """Traffic per update: one reduce-scatter and one all-gather, as much as data parallelism's all-reduce."""

    def __init__(self, ctx: Context) -> None:
        super().__init__(ctx)
        self._handles: dict[str, Handle] = {}
        self._sending = False

    def _buffer(self, bucket: Bucket) -> Tensor:
        return self._transport.allocate(bucket.size, bucket.dtype, self._device)

    def _send(self, bucket: Bucket) -> None:
        (slot,) = bucket.slots
        _, self._handles[slot.flat.key] = self._reduce(bucket.complete())

    def _add(self, bucket: Bucket, part: Tensor) -> None:
        bucket.memory()[self._own(bucket.size)].add_(part)

    def begin_backward(self, boundary: bool, scope: Scope) -> None:
        self._scope, self._sending = scope, boundary and scope == "mean"
        self._reductions.begin(self._sending)

    def end_backward(self) -> None:
        if self._sending:
            self._reductions.flush()

    def finish(self) -> Ballot:
        if self._scope == "local":
            return self._local_ballot()
        reductions = self._reductions
        reductions.flush()
        reductions.mend()
        for handle in self._handles.values():
            handle.wait()
        self._handles.clear()
        reductions.share_order(self._device)
        return self._ballot(self.gradient_of(shard) for shard in self.shards)

    def _local_ballot(self) -> Ballot:
        """The mean over ranks of their own squares: an upper bound of the average's."""
        for bucket in self._reductions.buckets:
            bucket.complete()
        ballot = self._ballot(bucket.memory() for bucket in self._reductions.buckets)
        return Ballot(ballot.squares / self._world, ballot.used, ballot.words * 0)

    def gradient_of(self, shard: Shard) -> Tensor:
        return self._reductions.slot(shard.key).whole[shard.start : shard.stop]

    def take(self, shard: Shard) -> Tensor:
        return self.gradient_of(shard).clone()

    def reset(self) -> None:
        self._reductions.reset()


descriptor = Descriptor(
    name="zero1",
    section="partition",
    contract=1,
    fills={"layout": Fill(offers={"gradients.local", "parameter.whole"})},
    summary="ZeRO stage 1: optimizer states sharded",
)


@hook
def dsx_partition() -> list[Part]:
    return [Part("layout", Zero1)]
