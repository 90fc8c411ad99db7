"""Every pair of ranks swaps a tensor: read from the other's memory where that can be, sent otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dsx.contracts import at_least_fp32
from dsx.defaults.direct import Direct
from dsx.defaults.words import Words

CHUNK = 1 << 18
"""Elements summed at a time: what is read stays in the cache."""


_SENDABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_SENDABLE |= {torch.uint8, torch.int8, torch.int32, torch.int64}


def sendable(tensor: Tensor) -> Tensor:
    """A contiguous tensor, or its bytes where gloo does not know its dtype (float8, int16, complex)."""
    return tensor if tensor.dtype in _SENDABLE else tensor.reshape(-1).view(torch.uint8)


class Swap:
    """`ins[r]` goes to rank r, `outs[r]` takes what comes from it. Made: everything is posted; `complete` finishes it.

    A rank that reads is told the address, and says when it has read. Receives are posted before sends: the other order
    halves a slow link's rate.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        rank: int,
        direct: Direct,
        words: Words,
        tag: int,
        outs: Sequence[Tensor],
        ins: Sequence[Tensor],
    ) -> None:
        self._group, self._direct, self._words, self._tag = group, direct, words, tag
        self._outs = outs = [sendable(tensor) for tensor in outs]
        self._ins = [sendable(tensor.contiguous()) for tensor in ins]
        world = len(outs)
        others = [(rank + step) % world for step in range(1, world)]
        self._readers = [peer for peer in others if direct.reaches(peer, self._ins[peer])]
        self._read = [peer for peer in reversed(others) if direct.reaches(peer, outs[peer])]
        sent = [peer for peer in others if peer not in self._readers]
        came = [peer for peer in reversed(others) if peer not in self._read]
        self._came = [self._receive(outs[peer], peer, 0) for peer in came]
        self._sent = [self._send(self._ins[peer], peer, 0) for peer in sent]
        self._untold = [peer for peer in self._readers if not self._tell(peer, wait=False)]

    @property
    def reads(self) -> bool:
        """Whether anything is read: then it needs `complete` to go on."""
        return bool(self._read or self._readers)

    def complete(self, take: Callable[[Mapping[int, int]], object] | None = None) -> None:
        """Wait for what is sent and read the rest.

        take  instead of reading into `outs`: address of the tensor by rank that is read from -> anything
        """
        for peer in self._untold:
            self._tell(peer, wait=True)
        for work in self._came:
            work.wait()
        addresses = {peer: self._words.hear(peer, self._tag + 1) for peer in self._read}
        if take is None:
            for peer, address in addresses.items():
                self._direct.read(peer, address, self._outs[peer])
        else:
            take(addresses)
        for peer in addresses:
            self._words.tell(peer, self._tag + 2, 0)
        for peer in self._readers:
            self._words.hear(peer, self._tag + 2)
        for work in self._sent:
            work.wait()

    def _tell(self, peer: int, wait: bool) -> bool:
        """Where to read; whether it was told."""
        return self._words.tell(peer, self._tag + 1, self._ins[peer].data_ptr(), wait=wait)

    def _receive(self, tensor: Tensor, peer: int, kind: int) -> Any:
        return dist.irecv(tensor, group=self._group, tag=self._tag + kind, group_src=peer)

    def _send(self, tensor: Tensor, peer: int, kind: int) -> Any:
        return dist.isend(tensor, group=self._group, tag=self._tag + kind, group_dst=peer)


TAGS = 3
"""Tags that a swap takes."""


class Rooms:
    """Where pieces are read to, one thread's: kept, for what a thread takes and lets go leaves holes in a heap of its
    own."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, ranks: Sequence[int], size: int, dtype: torch.dtype) -> dict[int, Tensor]:
        """By rank, uninitialised [size]; until the next call."""
        needed = len(ranks) * size * dtype.itemsize
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)
            self._memory = torch.empty(needed, dtype=torch.uint8)
        return dict(zip(ranks, self._memory[:needed].view(dtype).view(len(ranks), size), strict=True))


def sum_up(
    out: Tensor, parts: Sequence[Tensor], mean: bool, direct: Direct, addresses: Mapping[int, int], memory: Rooms
) -> None:
    """The sum of `parts` into `out` [n], in rank order, in at least fp32; divided once. Parts of ranks in `addresses`
    are read there, a piece at a time into `memory`. `out` may be one of the others."""
    wide = at_least_fp32(out.dtype) if out.is_floating_point() else out.dtype
    size = min(CHUNK, out.numel())
    rooms = memory.take(list(addresses), size, out.dtype) if addresses else {}
    overwrites = any(part.data_ptr() == out.data_ptr() for part in parts[2:])
    total = torch.empty(size, dtype=wide) if overwrites or wide != out.dtype else None
    for start in range(0, out.numel(), CHUNK):
        stop = min(start + CHUNK, out.numel())
        for rank, room in rooms.items():
            direct.read(rank, addresses[rank] + start * out.element_size(), room[: stop - start])
        first, second, *more = (
            rooms[rank][: stop - start] if rank in rooms else part[start:stop] for rank, part in enumerate(parts)
        )
        piece = out[start:stop]
        sums = piece if total is None else total[: stop - start]
        torch.add(first.to(wide), second, out=sums)
        for part in more:
            sums.add_(part)
        if mean:
            sums.div_(len(parts))
        if total is not None:
            piece.copy_(sums)
