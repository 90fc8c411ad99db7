"""The tier of host memory."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.contracts import Span, Tier, lasting
from dsx_offload.claims import Claims
from dsx_offload.lending import Lending


class HostTier(Tier):
    """States in pinned memory of the host where the model is on a GPU, in pages of their own where it is not."""

    place = "host"

    def __init__(self, claims: Claims, device: torch.device, *, update: str, piece_bytes: int) -> None:
        super().__init__()
        self._claims, self._device = claims, device
        self._piece = piece_bytes
        self._lending = Lending(device, on_device=update == "device")

    def claims(self, name: str, size: int) -> bool:
        return self._claims.take(name, size)

    def idle(self) -> str | None:
        return self._claims.idle()

    def room(self) -> int | None:
        return available_memory()

    def create(self, key: str, name: str, tensor: Tensor) -> None:
        self._tensors[key, name] = held = self._empty(tensor)
        held.copy_(tensor)

    def _empty(self, like: Tensor) -> Tensor:
        if like.device.type in ("cpu", "meta"):
            return lasting(like.numel(), like.dtype, like.device)
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)

    def grain(self, key: str) -> int | None:
        """Whole where nothing is copied."""
        if self._device.type in ("cpu", "meta"):
            return None
        return self._piece // max(self.kind(key, name).dtype.itemsize for name in self.names(key))

    def fetch(
        self,
        key: str,
        read: Sequence[str] = (),
        write: Sequence[str] = (),
        into: Tensor | None = None,
        span: Span | None = None,
    ) -> dict[str, Tensor]:
        lent = super().fetch(key, read, write, into, span)
        return {name: self._lending.lend(key, name, held, name in read) for name, held in lent.items()}

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        for name in (*dirty, *clean):
            self._lending.take_back(key, name, name in dirty)


def available_memory() -> int | None:
    """Bytes that this host can give without swapping; None where it does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        try:
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (OSError, ValueError):
            return None
