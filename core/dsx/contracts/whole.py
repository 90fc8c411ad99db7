"""What layouts share that keep parameters whole on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from dsx.contracts.data import Flat, Segment, Shard
from dsx.contracts.layout import Layout
from dsx.contracts.tier import Store
from dsx.contracts.transport import Transport


class WholeParameters(Layout):
    """Base of such layouts: live parameters in one buffer for each flat parameter, always there.

    live  by key of a flat parameter: [size]
    """

    def __init__(self, transport: Transport, store: Store) -> None:
        self._transport, self._store = transport, store
        self.live: dict[str, Tensor] = {}

    def adopt(self, flat: Flat, exact: Tensor) -> None:
        self.live[flat.key] = live = exact.to(flat.dtype)
        flat.attach(live)

    def target(self, shard: Shard) -> Tensor:
        return self.live[shard.key][shard.start : shard.stop]

    def resting(self, flat: Flat) -> Tensor:
        return self.live[flat.key]

    def _live_bytes(self) -> int:
        return sum(live.untyped_storage().nbytes() for live in self.live.values())

    @contextmanager
    def gathered(self, names: Sequence[str], modify: bool) -> Iterator[None]:
        yield
        if not modify:
            return
        shards = {shard.flat: shard for shard in self.shards}
        for flat in (flat for unit in self.units for flat in unit.flats):
            edited = [segment for segment in flat.segments if segment.name in names]
            for segment in edited:
                part = self.live[flat.key][segment.start : segment.stop]
                self._transport.broadcast(part, channel="admin", purpose="state").wait()
            if edited and flat in shards and "master" in self._store.names(flat.key):
                self._follow(shards[flat], edited)

    def _follow(self, shard: Shard, edited: Sequence[Segment]) -> None:
        """Rank 0's edits have become everyone's: this rank's part of the master weights takes them over."""
        live, master = self.live[shard.key], self._store.fetch(shard.key, ["master"])["master"]
        for segment in edited:
            low, high = max(segment.start, shard.start), min(segment.stop, shard.stop)
            if low < high:
                master[low - shard.start : high - shard.start].copy_(live[low:high])
        self._store.put(shard.key, ["master"])
