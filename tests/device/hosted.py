"""A transport by way of the host's memory, for ranks that share a GPU: NCCL refuses two on one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.contracts import Channel, Handle, Operation, Purpose, Transport
from dsx.defaults.collectives import Collectives
from dsx.plugin import Descriptor, Fill, Part, hook


class Hosted(Transport):
    """Copies tensors to the host, has gloo exchange the copies, and copies the results back."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.rank, self.world = inner, inner.rank, inner.world

    def all_gather(self, out: Tensor, shard: Tensor, *, channel: Channel, purpose: Purpose) -> Handle:
        there, mine = _room(out), shard.cpu()
        return _back(self._inner.all_gather(there, mine, channel=channel, purpose=purpose), [out], [there])

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose
    ) -> Handle:
        there, mine = _room(out), whole.cpu()
        return _back(self._inner.reduce_scatter(there, mine, op, channel=channel, purpose=purpose), [out], [there])

    def all_reduce(self, tensor: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose) -> Handle:
        there = _copy(tensor)
        return _back(self._inner.all_reduce(there, op, channel=channel, purpose=purpose), [tensor], [there])

    def all_to_all(
        self, outs: Sequence[Tensor], ins: Sequence[Tensor], *, channel: Channel, purpose: Purpose
    ) -> Handle:
        there, mine = [_room(out) for out in outs], [_copy(tensor) for tensor in ins]
        return _back(self._inner.all_to_all(there, mine, channel=channel, purpose=purpose), outs, there)

    def broadcast(self, tensor: Tensor, root: int = 0, *, channel: Channel, purpose: Purpose) -> Handle:
        there = _copy(tensor)
        return _back(self._inner.broadcast(there, root, channel=channel, purpose=purpose), [tensor], [there])

    def split(self, ranks: Sequence[int]) -> Transport:
        return Hosted(self._inner.split(ranks))

    def host(self) -> Transport:
        return self._inner.host()

    def close(self) -> None:
        self._inner.close()


class HostedPlugin:
    """For `dsx.prepare(..., plugins={"hosted": HostedPlugin()})` with "hosted" in [communicate]."""

    descriptor = Descriptor(
        name="hosted",
        section="communicate",
        contract=1,
        fills={"transport": Fill(offers={"transport.exact"})},
        summary="exchanges by way of the host's memory",
    )

    @hook
    def dsx_communicate(self) -> list[Part]:
        return [Part("transport", lambda ctx: Hosted(Collectives(torch.device("cpu"))))]


def _room(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _copy(tensor: Tensor) -> Tensor:
    return _room(tensor).copy_(tensor)


def _back(handle: Handle, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Handle:
    def finish() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return Handle([handle], finish)
