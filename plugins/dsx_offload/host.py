"""The tier of host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.contracts import PASSED, Event, Span, Tier, host_memory, lasting, pinned
from dsx_offload.claims import PARAMETER, Claims
from dsx_offload.lending import Lending, Place


class HostTier(Tier):
    """States in pinned memory of the host where the model is on a GPU, in pages of their own where it is not."""

    place = "host"

    def __init__(self, claims: Claims, device: torch.device, *, update: str, piece_bytes: int) -> None:
        super().__init__()
        self._claims, self._device = claims, device
        self._piece = piece_bytes
        self._lending = Lending(device, on_device=update == "device")
        self._home: dict[Place, Event] = {}

    def claims(self, name: str, size: int) -> bool:
        return self._claims.take(name, size)

    def idle(self) -> str | None:
        return self._claims.idle()

    def room(self) -> int | None:
        free = host_memory()
        return None if free is None else free.available

    def create(self, key: str, name: str, tensor: Tensor) -> None:
        self._tensors[key, name] = held = self._empty(tensor)
        held.copy_(tensor)

    def _empty(self, like: Tensor) -> Tensor:
        if like.device.type in ("cpu", "meta"):
            return lasting(like.numel(), like.dtype, like.device)
        return pinned(like.numel(), like.dtype, like.device)

    def grain(self, key: str) -> int | None:
        """Whole where nothing is copied."""
        if self._device.type in ("cpu", "meta"):
            return None
        return self._piece // max(self.kind(key, name).dtype.itemsize for name in self.names(key))

    def prefetch(self, key: str, read: Sequence[str], span: Span | None = None) -> None:
        for name in read:
            straight = name == PARAMETER and span is None  # a layout has a whole one copied into its place
            if not straight and self._lending.copies(name, self._tensors[key, name]):
                self._lending.bring(key, name, self._part(key, name, span))

    def fetch(
        self,
        key: str,
        read: Sequence[str] = (),
        write: Sequence[str] = (),
        into: Tensor | None = None,
        span: Span | None = None,
    ) -> dict[str, Tensor]:
        if into is not None:
            (name,) = read
            self._await(key, name, into.device)
            into.copy_(self._part(key, name, span), non_blocking=True)
            return {}
        held = {name: self._part(key, name, span) for name in (*read, *write)}
        for name, part in held.items():
            if not self._lending.copies(name, part):
                self._await(key, name, part.device)
        return {name: self._lending.lend(key, name, part, name in read) for name, part in held.items()}

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        for name in (*dirty, *clean):
            home = self._lending.take_back(key, name, name in dirty)
            if name in dirty:
                self._home[key, name] = home

    def drain(self) -> None:
        for home in list(self._home.values()):
            home.synchronize()
        self._home.clear()

    def close(self) -> None:
        self.drain()
        super().close()

    def _part(self, key: str, name: str, span: Span | None) -> Tensor:
        return self._tensors[key, name][slice(*span) if span else slice(None)]

    def _await(self, key: str, name: str, reader: torch.device) -> None:
        """What a device still has to bring home of a state comes before `reader` reads it."""
        home = self._home.get((key, name), PASSED)
        if reader.type == "cpu":
            home.synchronize()
        else:
            home.wait()
