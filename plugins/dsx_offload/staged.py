"""New parameters in memory of their own, until they take the place of the live ones."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx.contracts import Layout, Part, Shard, Store, Walk, lasting


class Staged:
    """One parameter of each shard that was asked for: [stop - start], of the live parameter's dtype."""

    def __init__(self, walk: Walk, layout: Layout, store: Store, device: torch.device) -> None:
        self._walk, self._layout, self._store, self._device = walk, layout, store, device
        self._held: dict[Shard, Tensor] = {}

    def of(self, shard: Shard) -> Tensor:
        """A shard's, made at its first use."""
        if shard not in self._held:
            self._held[shard] = lasting(shard.stop - shard.start, shard.flat.dtype, self._device)
        return self._held[shard]

    def part(self, part: Part) -> Tensor:
        """That of a piece."""
        return self._held[part.piece.shard][slice(*part.span)]

    def copy_live(self, shard: Shard) -> None:
        """Take the parameter as it is now, which somebody may have edited: where it is itself what is updated, or not
        all of it is."""
        here, target = self.of(shard), self._layout.target(shard)
        if target is not None:
            here.copy_(target)
            return
        for part in self._walk.parts_of(shard):
            self._store.fetch(shard.key, ["param"], into=self.part(part), span=part.span)

    def show(self, shard: Shard) -> None:
        """Let it take the place of the live one; it is still to be published."""
        new, target = self.of(shard), self._layout.target(shard)
        if target is not None:
            target.copy_(new)
            return
        for part in self._walk.parts_of(shard):
            live = self._store.fetch(shard.key, [], ["param"], span=part.span)["param"]
            live.copy_(self.part(part))
            self._store.put(shard.key, dirty=["param"])

    def bytes(self) -> int:
        """Bytes held."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._held.values())
