"""A transport to ranks that do not exist: each does just what this one does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dsx.contracts import Channel, Handle, Operation, Purpose, Transport

Working = Callable[[int], tuple[int, int]]
"""Bytes of a tensor -> bytes that the transport it stands for takes to sum it up: (while it does, one tensor at a time;
from the start until it is waited for)."""


class Twin(Transport):
    """Every rank's numbers are this rank's own. Of tensors on the meta device nothing moves.

    working  memory that reductions take
    """

    def __init__(self, rank: int, world: int, working: Working = lambda size: (0, 0)) -> None:
        self.rank, self.world, self._working = rank, world, working

    def all_gather(self, out: Tensor, shard: Tensor, *, channel: Channel, purpose: Purpose) -> Handle:
        if not out.is_meta:
            out.view(self.world, -1).copy_(shard.clone().view(1, -1))
        return Handle()

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose
    ) -> Handle:
        if out.is_meta:
            return self._under_way(whole)
        mine = whole.view(self.world, -1)[self.rank]
        out.copy_(mine * (self.world if op == "sum" else 1))
        return Handle()

    def all_reduce(self, tensor: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose) -> Handle:
        if tensor.is_meta:
            return self._under_way(tensor)
        if op == "sum":
            tensor.mul_(self.world)
        return Handle()

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, channel: Channel, purpose: Purpose
    ) -> Handle:
        for out, part in zip(outs, ins, strict=True):
            if out.shape == part.shape and not out.is_meta:
                out.copy_(part)
        return Handle()

    def split(self, ranks: Sequence[int]) -> Transport:
        return Twin(list(ranks).index(self.rank), len(ranks), self._working)

    def _under_way(self, tensor: Tensor) -> Handle:
        passing, staying = self._working(tensor.numel() * tensor.element_size())
        _room(passing)
        room = _room(staying)
        return Handle((), room.size)  # which keeps it until it was waited for


def _room(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")
