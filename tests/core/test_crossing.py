"""Pieces whose states are on the host and whose gradients are not: brought ahead, waited for one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.contracts import Flat, Kind, Layout, Piece, Rule, Segment, Shard, State, Store, Walk, streams
from happens_before import Recorder, recorded

SIZE, GRAIN = 100, 32
FAR = torch.device("meta")
"""In the place of a device: the recorder knows what is read and written there, which here has no values."""


class Momentum(Rule):
    states = (State("momentum"),)


class Apart(Layout):
    """Gradients and parameters on the device."""

    def __init__(self) -> None:
        segment = Segment("weight", 0, SIZE, torch.Size([SIZE]), "all", 0)
        flat = Flat("f", torch.float32, torch.float32, True, (segment,), (), SIZE)
        self.shards = [Shard(flat, 0, SIZE, (0, SIZE))]
        self.grad, self.param = torch.zeros(SIZE, device=FAR), torch.zeros(SIZE, device=FAR)

    def gradient_of(self, shard: Shard, span: Any = None) -> Tensor:
        return self.grad[slice(*span)] if span else self.grad

    def target(self, shard: Shard) -> Tensor:
        return self.param


class Here(Store):
    """States on the host."""

    def __init__(self, *names: str) -> None:
        self._states = {name: torch.zeros(SIZE) for name in names}

    def names(self, key: str) -> list[str]:
        return list(self._states)

    def kind(self, key: str, name: str) -> Kind:
        return Kind(SIZE, torch.float32)

    def grain(self, key: str) -> int:
        return GRAIN

    def prefetch(self, key: str, read: Sequence[str], span: Any = None) -> None:
        pass

    def fetch(self, key: str, read: Any = (), write: Any = (), into: Any = None, span: Any = None) -> dict[str, Tensor]:
        return {name: self._states[name][slice(*span) if span else slice(None)] for name in (*read, *write)}

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        pass


def sweep(recorder: Recorder, *names: str) -> list[int]:
    """Walk once; how many copies to the host had been started when each piece was updated."""
    walk, started = Walk(Momentum(), Apart(), Here(*names)), []

    def update(piece: Piece, states: Mapping[str, Tensor]) -> None:
        started.append(recorder.copies)
        states["momentum"].add_(states["grad"])
        states["master"].sub_(states["momentum"])
        if states["param"] is not states["master"]:
            states["param"].copy_(states["master"])

    walk.sweep(update)
    return started


class Counting(Recorder):
    """Counts copies to the host."""

    copies = 0

    def touch(self, reads: Any, writes: Any, what: str, timeline: Any = None) -> None:
        reads, writes = list(reads), list(writes)
        crosses = what == "aten.copy_.default" and writes[0].device.type == "cpu" and reads[0].device == FAR
        self.copies += crosses
        super().touch(reads, writes, what, timeline)


@pytest.fixture
def recorder(monkeypatch):
    monkeypatch.setattr("happens_before.Recorder", Counting)
    with recorded(monkeypatch, "meta") as made:
        yield made


@pytest.mark.parametrize("names", [("momentum",), ("master", "momentum")], ids=" ".join)
def test_while_one_piece_is_updated_the_next_is_on_its_way(recorder: Counting, names: tuple[str, ...]) -> None:
    assert sweep(recorder, *names) == [4, 6, 8, 8], "gradient and parameter of four pieces, one piece ahead"
    assert recorder.races == []


def test_each_piece_is_waited_for(monkeypatch, recorder: Counting) -> None:
    monkeypatch.setattr(streams._DeviceEvent, "synchronize", lambda self: None)
    sweep(recorder, "momentum")
    assert any("of host does not wait for aten.copy_.default of side" in words for words in recorder.races)


def test_a_copy_begins_after_what_was_written_before(monkeypatch, recorder: Counting) -> None:
    monkeypatch.setattr(streams._DeviceSide, "follow", lambda self: None)
    sweep(recorder, "momentum")
    assert any("of side 1 does not wait for" in words for words in recorder.races)


def test_an_update_that_fails_leaves_nothing_for_the_next_sweep(recorder: Counting) -> None:
    walk = Walk(Momentum(), Apart(), Here("momentum"))

    def fail(piece: Piece, states: Mapping[str, Tensor]) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        walk.sweep(fail)
    before = recorder.copies
    walk.sweep(lambda piece, states: None)
    assert recorder.copies - before == 8, "every piece is brought anew"
