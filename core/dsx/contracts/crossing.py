"""A piece's tensors on one device, that of the rule's states; what lies elsewhere is brought there, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts.streams import PASSED, Event, Side, pinned


@frozen(eq=False)
class Copy:
    """A copy, when it is there, and what it is of: kept until then, since its memory might be lent on."""

    source: Tensor
    near: Tensor
    there: Event


class Crossing:
    """Between a device and host memory, by way of pinned memory and beside the device's other work: while the host
    updates a piece, what it needs of the next one is on its way."""

    def __init__(self) -> None:
        self._sides: dict[torch.device, Side] = {}

    def bring(self, tensors: Mapping[str, Tensor], device: torch.device) -> Mapping[str, Copy]:
        """Start copying tensors of one piece to `device`."""
        return {name: self._copy(tensor, device) for name, tensor in tensors.items()}

    @contextmanager
    def together(self, states: Mapping[str, Tensor], coming: Mapping[str, Copy]) -> Iterator[Mapping[str, Tensor]]:
        """The same states on one device; what is written to them is theirs when the context is left.

        coming  copies of some of them that were brought before
        """
        device = device_of(states)
        elsewhere = {name: tensor for name, tensor in states.items() if tensor.device != device}
        if not elsewhere:
            yield states
            return
        copies = {id(elsewhere[name]): copy for name, copy in coming.items() if name in elsewhere}
        for tensor in elsewhere.values():
            if id(tensor) not in copies:  # master and param may be one
                copies[id(tensor)] = self._copy(tensor, device)
        for copy in copies.values():
            copy.there.synchronize()
        yield {name: copies[id(tensor)].near if name in elsewhere else tensor for name, tensor in states.items()}
        for tensor in {id(tensor): tensor for name, tensor in elsewhere.items() if name != "grad"}.values():
            tensor.copy_(copies[id(tensor)].near, non_blocking=True)
        Event.now(device).synchronize()  # what lies on the host is there before a host reads it

    def _copy(self, source: Tensor, device: torch.device) -> Copy:
        if device.type != "cpu":
            return Copy(source, source.to(device, non_blocking=True), PASSED)
        side = self._sides.get(source.device)
        if side is None:
            side = self._sides[source.device] = Side.of(source.device)
        near = pinned(source.numel(), source.dtype, source.device)
        with side.beside():
            near.copy_(source, non_blocking=True)
        return Copy(source, near, side.mark())


def device_of(states: Mapping[str, Tensor]) -> torch.device:
    """That of the rule's own states, the masters among them."""
    return next(tensor.device for name, tensor in states.items() if name not in ("param", "grad"))
