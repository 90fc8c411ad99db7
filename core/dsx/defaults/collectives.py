"""The null transport of several processes: torch.distributed, with an exchange of our own where gloo has none worth
using.

gloo's reduce_scatter moves the bytes of an all_reduce, and its all_reduce of 16-bit tensors adds up in 16 bits. Both
are replaced by an exchange of shards: each rank sends each other rank its slice, and sums what it got in rank order, in
fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.contracts import CHANNELS, Channel, Handle, Operation, Purpose, Transport, at_least_fp32

_TAGS = 1 << 30


class Collectives(Transport):
    """Collectives among all ranks of the default process group, or among `ranks` of it.

    Each channel has a process group of its own, so that operations of different channels cannot take each other's
    messages. Every engine has its own.
    """

    def __init__(self, device: torch.device, ranks: Sequence[int] | None = None) -> None:
        self._device = device
        members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        self.rank, self.world = members.index(dist.get_rank()), len(members)
        self._groups: dict[str, Any] = {channel: dist.new_group(members) for channel in CHANNELS}
        self._gloo = device.type == "cpu"
        self._tags: dict[str, count[int]] = {channel: count() for channel in CHANNELS}

    def all_gather(self, out: Tensor, shard: Tensor, *, channel: Channel, purpose: Purpose) -> Handle:
        if self._gloo:
            return self._exchange(list(out.view(self.world, -1)), [shard] * self.world, channel)
        return Handle([dist.all_gather_into_tensor(out, shard, group=self._groups[channel], async_op=True)])

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose
    ) -> Handle:
        if not self._gloo:
            kind = dist.ReduceOp.AVG if op == "mean" else dist.ReduceOp.SUM
            work = dist.reduce_scatter_tensor(out, whole, op=kind, group=self._groups[channel], async_op=True)
            return Handle([work])
        slices = whole.view(self.world, -1).unbind()
        came = [mine if rank == self.rank else torch.empty_like(mine) for rank, mine in enumerate(slices)]
        return self._exchange(came, slices, channel, lambda: _reduce(out, came, op))

    def all_reduce(self, tensor: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose) -> Handle:
        if self._gloo and tensor.dtype.is_floating_point and tensor.dtype != at_least_fp32(tensor.dtype):
            return self._all_reduce_16bit(tensor, op, channel)
        average = op == "mean" and not self._gloo
        kind = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        work = dist.all_reduce(tensor, op=kind, group=self._groups[channel], async_op=True)
        return Handle([work], (lambda: tensor.div_(self.world)) if op == "mean" and not average else None)

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, channel: Channel, purpose: Purpose
    ) -> Handle:
        return self._exchange(outs, ins, channel)

    def broadcast(self, tensor: Tensor, root: int = 0, *, channel: Channel, purpose: Purpose) -> Handle:
        group = self._groups[channel]
        return Handle([dist.broadcast(tensor, group=group, group_src=root, async_op=True)])

    def split(self, ranks: Sequence[int]) -> Transport:
        members = dist.get_process_group_ranks(self._groups["admin"])
        return Collectives(self._device, [members[rank] for rank in ranks])

    def close(self) -> None:
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._groups.clear()

    def _tag(self, channel: Channel) -> int:
        return next(self._tags[channel]) % _TAGS

    def _exchange(
        self,
        outs: Sequence[Tensor],
        ins: Sequence[Tensor],
        channel: Channel,
        finish: Callable[[], object] | None = None,
        tag: int | None = None,
    ) -> Handle:
        """Every pair of ranks swaps a tensor. Receives are posted before sends: the other order halves a slow link's
        rate."""
        group, tag = self._groups[channel], self._tag(channel) if tag is None else tag
        others = [(self.rank + step) % self.world for step in range(1, self.world)]
        ins = [tensor.contiguous() for tensor in ins]
        works = [dist.irecv(outs[peer], group=group, tag=tag, group_src=peer) for peer in reversed(others)]
        works += [dist.isend(ins[peer], group=group, tag=tag, group_dst=peer) for peer in others]
        if outs[self.rank].data_ptr() != ins[self.rank].data_ptr():
            outs[self.rank].copy_(ins[self.rank])
        buffers = (outs, ins)
        return Handle(works, lambda: (buffers, finish and finish()))

    def _all_reduce_16bit(self, tensor: Tensor, op: Operation, channel: Channel) -> Handle:
        """Sum slices in fp32, then gather them; the second half starts in `wait`, so waits must come in issue order."""
        slices = tensor.view(-1).tensor_split(self.world)
        mine = slices[self.rank]
        came = [mine if rank == self.rank else torch.empty_like(mine) for rank in range(self.world)]
        first, second = self._exchange(came, slices, channel), self._tag(channel)

        def finish() -> None:
            first.wait()
            _reduce(mine, came, op)
            self._exchange(slices, [mine] * self.world, channel, tag=second).wait()

        return Handle((), finish)


def _reduce(out: Tensor, parts: Sequence[Tensor], op: Operation) -> None:
    """Sum in rank order, in at least fp32; divide once."""
    total = parts[0].to(at_least_fp32(out.dtype), copy=True) if out.is_floating_point() else parts[0].clone()
    for part in parts[1:]:
        total.add_(part)
    if op == "mean":
        total.div_(len(parts))
    out.copy_(total)
