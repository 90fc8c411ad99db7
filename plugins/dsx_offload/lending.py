"""Copies on the device of what rests in host memory."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from dsx_offload.claims import GRADIENT, PARAMETER


class Lending:
    """Lends host memory as it lies where an update runs on the host; else, and what the layout reads and writes itself
    (parameters and gradients), as a copy on the device.

    device     of the model
    on_device  whether updates run there
    """

    def __init__(self, device: torch.device, on_device: bool) -> None:
        self._device, self._all = device, on_device
        self._copies: dict[tuple[str, str], list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def lend(self, key: str, name: str, held: Tensor, read: bool) -> Tensor:
        """`held`, or a copy of it, with its values if it is to be read."""
        if held.device == self._device or not (self._all or name in (GRADIENT, PARAMETER)):
            return held
        near = held.to(self._device, non_blocking=True) if read else torch.empty_like(held, device=self._device)
        self._copies[key, name].append((held, near))
        return near

    def take_back(self, key: str, name: str, dirty: bool) -> None:
        """The end of a loan; what was changed of a copy is brought home."""
        for held, near in self._copies.pop((key, name), ()):
            if dirty:
                held.copy_(near)
