"""A transport that counts what a rank sends, by purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from dsx.contracts import Channel, Handle, Operation, Purpose, Transport, TransportWrapper


class Counting(TransportWrapper):
    """Counts calls and the bytes that an optimal algorithm sends from this rank.

    all_gather, reduce_scatter (N - 1)/N of the whole; all_reduce twice that; all_to_all what goes to others; broadcast
    the whole, once for each other rank, at the root.

    bytes, calls  by purpose
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def reset(self) -> None:
        """Count from nothing."""
        self.bytes.clear()
        self.calls.clear()

    def _count(self, purpose: Purpose, size: float) -> None:
        self.calls[purpose] += 1
        self.bytes[purpose] += round(size)

    def all_gather(self, out: Tensor, shard: Tensor, *, channel: Channel, purpose: Purpose) -> Handle:
        self._count(purpose, _bytes(shard) * (self.world - 1))
        return super().all_gather(out, shard, channel=channel, purpose=purpose)

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose
    ) -> Handle:
        self._count(purpose, _bytes(whole) * (self.world - 1) / self.world)
        return super().reduce_scatter(out, whole, op, channel=channel, purpose=purpose)

    def all_reduce(self, tensor: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose) -> Handle:
        self._count(purpose, 2 * _bytes(tensor) * (self.world - 1) / self.world)
        return super().all_reduce(tensor, op, channel=channel, purpose=purpose)

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, channel: Channel, purpose: Purpose
    ) -> Handle:
        self._count(purpose, sum(_bytes(part) for rank, part in enumerate(ins) if rank != self.rank))
        return super().all_to_all(outs, ins, channel=channel, purpose=purpose)

    def broadcast(self, tensor: Tensor, root: int = 0, *, channel: Channel, purpose: Purpose) -> Handle:
        self._count(purpose, _bytes(tensor) * (self.world - 1) if self.rank == root else 0)
        return super().broadcast(tensor, root, channel=channel, purpose=purpose)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
