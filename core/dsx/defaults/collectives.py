"""The null transport of several processes: torch.distributed, with an exchange of our own where gloo has none worth
using.

gloo's reduce_scatter moves the bytes of an all_reduce, and its all_reduce of 16-bit tensors adds up in 16 bits. Both
are replaced by an exchange of shards: each rank gives each other rank its slice, and sums what it got in rank order, in
fp32. Between ranks of one host nothing is sent: they read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.contracts import CHANNELS, Channel, Handle, Operation, Purpose, Transport, at_least_fp32
from dsx.defaults.direct import Direct
from dsx.defaults.line import Line
from dsx.defaults.swap import CHUNK, TAGS, Rooms, Swap, sendable, sum_up
from dsx.launch.distributed import let_go, patience

_LAST_TAG = TAGS << 29


class Collectives(Transport):
    """Collectives among all ranks of the default process group, or among `ranks` of it.

    Each channel has a process group of its own, so that operations of different channels cannot take each other's
    messages. Every engine has its own.
    """

    def __init__(self, device: torch.device, ranks: Sequence[int] | None = None) -> None:
        self._device = device
        members = list(range(dist.get_world_size())) if ranks is None else list(ranks)
        self.rank, self.world = members.index(dist.get_rank()), len(members)
        self._gloo = device.type == "cpu"
        backend = "gloo" if self._gloo else None  # None: the default group's
        limit = patience()
        self._groups: dict[str, Any] = {name: dist.new_group(members, limit, backend) for name in CHANNELS}
        self._direct = self._find(limit.total_seconds()) if self._gloo else Direct.nobody(self.world, CHANNELS)
        self._lines = {channel: Line() for channel in CHANNELS}
        self._rooms = {channel: Rooms() for channel in CHANNELS}  # used on the channel's line alone
        self._host: Collectives | None = None
        self._tags: dict[str, count[int]] = {channel: count() for channel in CHANNELS}

    def _find(self, patience_s: float) -> Direct:
        return Direct.among(self.rank, self.world, self._gather_words, CHANNELS, patience_s)

    def _gather_words(self, words: Tensor) -> Tensor:
        """int64 [n] of each rank -> [world, n], before there is anything else to do it with."""
        every = [torch.empty_like(words) for _ in range(self.world)]
        dist.all_gather(every, words, group=self._groups["admin"])
        return torch.stack(every)

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
        swap, complete = self._summing(whole.view(self.world, -1).unbind(), out, op, channel)
        return self._finish(complete, channel, swap.reads)

    def all_reduce(self, tensor: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose) -> Handle:
        if self._gloo and tensor.is_floating_point() and (_narrow(tensor.dtype) or self._read_everywhere(tensor)):
            return self._all_reduce_slices(tensor, op, channel)
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
        words = sendable(tensor) if self._gloo and tensor.is_contiguous() else tensor
        return Handle([dist.broadcast(words, group=group, group_src=root, async_op=True)])

    def split(self, ranks: Sequence[int]) -> Transport:
        members = dist.get_process_group_ranks(self._groups["admin"])
        return Collectives(self._device, [members[rank] for rank in ranks])

    def host(self) -> Transport:
        if self._gloo:
            return self
        if self._host is None:
            self._host = Collectives(torch.device("cpu"), dist.get_process_group_ranks(self._groups["admin"]))
        return self._host

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        for line in self._lines.values():
            line.stop()
        self._direct.close()
        groups = list(self._groups.values())
        self._groups.clear()
        for group in groups:
            dist.destroy_process_group(group)
        del group
        let_go(groups)

    def _read_everywhere(self, tensor: Tensor) -> bool:
        """Whether all ranks would read their slices of a tensor; gloo's ring is as good for small ones."""
        return self._direct.everywhere and self._direct.large(tensor.numel() // self.world * tensor.element_size())

    def _tag(self, channel: Channel) -> int:
        return next(self._tags[channel]) * TAGS % _LAST_TAG

    def _swap(self, outs: Sequence[Tensor], ins: Sequence[Tensor], channel: Channel) -> Swap:
        tag = self._tag(channel)
        if outs[self.rank].data_ptr() != ins[self.rank].data_ptr():
            outs[self.rank].copy_(ins[self.rank])
        return self._made(channel, tag, outs, ins)

    def _made(self, channel: Channel, tag: int, outs: Sequence[Tensor], ins: Sequence[Tensor]) -> Swap:
        return Swap(self._groups[channel], self.rank, self._direct, self._direct.words[channel], tag, outs, ins)

    def _exchange(self, outs: Sequence[Tensor], ins: Sequence[Tensor], channel: Channel) -> Handle:
        swap = self._swap(outs, ins, channel)
        return self._finish(swap.complete, channel, swap.reads)

    def _finish(self, work: Callable[[], object], channel: Channel, alone: bool) -> Handle:
        """`alone`: on the channel's own thread, so that it goes on while nobody waits; otherwise when waited for."""
        return Handle([self._lines[channel].add(work)]) if alone else Handle((), work)

    def _summing(self, slices: Sequence[Tensor], out: Tensor, op: Operation, channel: Channel) -> tuple[Swap, Work]:
        """Swap slices; and what completes it, with the reduction of this rank's in `out`."""
        mine = slices[self.rank]
        kept = [rank == self.rank or self._direct.reaches(rank, mine) for rank in range(self.world)]
        came = [mine if here else torch.empty_like(mine) for here in kept]
        swap = self._swap(came, slices, channel)

        def reduce(addresses: Mapping[int, int]) -> None:
            sum_up(out, came, op == "mean", self._direct, addresses, self._rooms[channel])

        return swap, lambda: swap.complete(reduce)

    def _all_reduce_slices(self, tensor: Tensor, op: Operation, channel: Channel) -> Handle:
        """Sum slices, then gather them. Without a thread the second half starts in `wait`, so waits must come in issue
        order."""
        slices = tensor.view(-1).tensor_split(self.world)
        mine = slices[self.rank]
        first, complete = self._summing(slices, mine, op, channel)
        tag = self._tag(channel)

        def work() -> None:
            complete()
            self._made(channel, tag, slices, [mine] * self.world).complete()

        return self._finish(work, channel, first.reads)


def working_bytes(size: int, world: int, local: int) -> tuple[int, int]:
    """Memory that summing up a tensor of `size` bytes over `world` ranks takes on gloo: (while it is done, one at a
    time; from when it is started until it is waited for).

    local  ranks on this host, which are read; what the others send is kept until it is summed
    """
    each = size // world
    return (local - 1) * min(each, CHUNK * 4), (world - local) * each


Work = Callable[[], object]


def _narrow(dtype: torch.dtype) -> bool:
    return dtype != at_least_fp32(dtype)
