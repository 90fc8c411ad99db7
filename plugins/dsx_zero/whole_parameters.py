"""Parameters whole on every rank: after an update each rank's part travels to all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from dsx.contracts import Boundary, Flat, Handle, Shard, Unit, WholeParameters
from dsx.plugin import Context
from dsx_zero.layout import MakeGradients, Sharded


class Published(Sharded, WholeParameters):
    """Traffic of an update: one all-gather. It is under way while later parts are updated, and if asked until the unit
    is entered again."""

    boundaries: frozenset[Boundary] = frozenset({"enter"})

    def __init__(self, ctx: Context, units: Sequence[Unit], gradients: MakeGradients) -> None:
        WholeParameters.__init__(self, ctx.transport, ctx.store)
        Sharded.__init__(self, ctx, units, gradients)
        self._published: dict[str, Handle] = {}

    def adopt(self, flat: Flat, exact: Tensor) -> None:
        super().adopt(flat, exact)
        if flat.trainable:
            self.gradients.adopt(flat)

    def enter(self, unit: Unit) -> None:
        self.want(unit)
        for flat in unit.flats:
            self._arrive(flat.key)

    def _arrive(self, key: str) -> None:
        if (handle := self._published.pop(key, None)) is not None:
            handle.wait()

    def publish(self, shard: Shard) -> None:
        live = self.live[shard.key]
        mine = live[shard.start : shard.stop]
        self._published[shard.key] = self._transport.all_gather(live, mine, channel="gather", purpose="publish")

    def local(self, shard: Shard) -> tuple[Tensor, Tensor]:
        return self.gradients.local(shard), self.live[shard.key]

    def bytes(self) -> Mapping[str, int]:
        return {"param": self._live_bytes(), **self.gradients.bytes()}

    def settle(self) -> None:
        self.want()
        for key in list(self._published):
            self._arrive(key)
