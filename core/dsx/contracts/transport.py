"""Roles `transport` (one filler) and `wrappers` (a chain, outermost first in manifest order): moves tensors between
ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from dsx.contracts.memory import lasting

Channel = Literal["gather", "reduce", "rule", "vote", "admin"]
"""Separate sequences of operations. Within one, every rank issues the same operations in the same order; between
channels the order is free. On a single one, a branch taken by one rank would silently swap two messages."""

Purpose = Literal["gather", "publish", "reduce", "state", "rule", "vote", "admin"]
"""What an operation is for: counters and codecs select by it. `vote`, `state` and `admin` are never altered."""

Operation = Literal["mean", "sum"]

CHANNELS: tuple[Channel, ...] = ("gather", "reduce", "rule", "vote", "admin")


class Handle:
    """An operation under way. It keeps its buffers alive until waited for."""

    def __init__(self, works: Sequence[Any] = (), finish: Callable[[], object] | None = None) -> None:
        self._works, self._finish = works, finish

    def wait(self) -> None:
        """Block until the result is there; may be called again, and then does nothing."""
        works, self._works = self._works, ()
        for work in works:
            work.wait()
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Transport:
    """The null part for one process: every exchange is with itself.

    rank, world  of the group it serves
    lossy        purposes on which a wrapper does not deliver exactly what was sent

    Operations are issued by the engine's thread only and return a `Handle`; buffers belong to the operation until it is
    waited for. A non-finite input reaches all ranks as non-finite. All ranks, the owner too, end with the same bits.
    `mean` accumulates in at least fp32 and divides once, by the group's size.
    """

    rank: int = 0
    world: int = 1
    lossy: frozenset[str] = frozenset()

    def all_gather(self, out: Tensor, shard: Tensor, *, channel: Channel, purpose: Purpose) -> Handle:
        """Every rank's `shard` [n], in rank order, into `out` [world * n]. `shard` may be `out`'s own slice."""
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return Handle()

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose
    ) -> Handle:
        """The reduction over ranks of `whole` [world * n], this rank's slice of it into `out` [n]."""
        if out.data_ptr() != whole.data_ptr():
            out.copy_(whole)
        return Handle()

    def all_reduce(self, tensor: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose) -> Handle:
        """The reduction over ranks of `tensor`, in place, on every rank."""
        return Handle()

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, channel: Channel, purpose: Purpose
    ) -> Handle:
        """`ins[r]` goes to rank r; `outs[r]` receives what rank r sent to this one. Sizes may differ by pair."""
        if outs[0].data_ptr() != ins[0].data_ptr():
            outs[0].copy_(ins[0])
        return Handle()

    def broadcast(self, tensor: Tensor, root: int = 0, *, channel: Channel, purpose: Purpose) -> Handle:
        """`root`'s tensor into everyone's, in place."""
        return Handle()

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer [size] that this transport moves best (pinned, registered, shared); lives as long as its last
        reference."""
        return lasting(size, dtype, device)

    def split(self, ranks: Sequence[int]) -> Transport:
        """A transport among `ranks` of this one's; entered by all ranks of this one."""
        return self

    def host(self) -> Transport:
        """A transport among the same ranks for small tensors in host memory, by which they agree without waiting for a
        device; entered by all of them."""
        return self

    def close(self) -> None:
        """Wait for every operation and give back what was taken."""


class TransportWrapper(Transport):
    """Base of codecs, counters and other fast paths: hands everything to `inner` until a subclass changes it."""

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.rank, self.world, self.lossy = inner.rank, inner.world, inner.lossy

    def all_gather(self, out: Tensor, shard: Tensor, *, channel: Channel, purpose: Purpose) -> Handle:
        return self.inner.all_gather(out, shard, channel=channel, purpose=purpose)

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose
    ) -> Handle:
        return self.inner.reduce_scatter(out, whole, op, channel=channel, purpose=purpose)

    def all_reduce(self, tensor: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose) -> Handle:
        return self.inner.all_reduce(tensor, op, channel=channel, purpose=purpose)

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, channel: Channel, purpose: Purpose
    ) -> Handle:
        return self.inner.all_to_all(outs, ins, channel=channel, purpose=purpose)

    def broadcast(self, tensor: Tensor, root: int = 0, *, channel: Channel, purpose: Purpose) -> Handle:
        return self.inner.broadcast(tensor, root, channel=channel, purpose=purpose)

    def allocate(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.inner.allocate(size, dtype, device)

    def split(self, ranks: Sequence[int]) -> Transport:
        return type(self)(self.inner.split(ranks))

    def host(self) -> Transport:
        return type(self)(self.inner.host())

    def close(self) -> None:
        self.inner.close()


Wrap = Callable[[Transport], Transport]
"""What a builder of role `wrappers` returns."""
