"""On a device with streams every stage orders what it reads and writes; and each of the waits that do so is needed."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import dsx
from dsx.contracts import streams
from dsx.testing.models import Tangle, tokens
from dsx_zero.rooms import Resized
from happens_before import CollectivesPlugin, Recorder, recorded


def train(
    patch: pytest.MonkeyPatch,
    recorder: Recorder | None,
    stage: str,
    accumulation: int = 1,
    collectives: bool = True,
    **options: Any,
) -> list[float]:
    """Losses of three updates; whole parameters come and go by the allocator, as on a GPU.

    collectives  on streams of their own; False: none, as for one rank
    """

    class Told(Resized):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor)
            self._tensor = tensor.detach()

        def fill(self) -> None:
            if self.bytes() != self._size:
                super().fill()
                recorder.took(self._tensor)

        def empty(self) -> None:
            recorder.gave(self._tensor)
            super().empty()

    patch.setattr("dsx_zero.residence.mappable", lambda device: False)
    patch.setattr("dsx_zero.sharded_gradients.comes_back", lambda device: False)
    if recorder is not None:
        patch.setattr("dsx_zero.residence.Resized", Told)
    noted = recorder is not None and collectives
    manifest = {
        "partition": {"use": [stage], **({stage: options} if options else {})},
        "communicate": {"use": ["recorded"] if noted else []},
        "batch": {"accumulation": accumulation},
        "optimize": {"clip_norm": 0.5},
    }
    plugins = {"recorded": CollectivesPlugin(recorder)} if noted else {}
    engine = dsx.prepare(Tangle(width=16, layers=4), manifest, plugins=plugins)
    steps = [[tokens(step, micro, 0) for micro in range(accumulation)] for step in range(3)]
    losses = [engine.train_step(batches).loss for batches in steps]
    engine.close()
    return losses


CASES = [
    ("zero1", 1, {}),
    ("zero2", 1, {}),
    ("zero2", 2, {}),
    ("zero3", 1, {}),
    ("zero3", 2, {}),
    ("zero3", 1, {"prefetch": 0}),
    ("zero3", 1, {"prefetch": 2, "whole": ["root"]}),
]


@pytest.mark.parametrize("collectives", [True, False])
@pytest.mark.parametrize(("stage", "accumulation", "options"), CASES)
def test_everything_waits_for_what_it_reads_and_overwrites(
    monkeypatch, stage, accumulation, options, collectives
) -> None:
    plain = train(monkeypatch, None, stage, accumulation, **options)
    with recorded(monkeypatch) as recorder:
        losses = train(monkeypatch, recorder, stage, accumulation, collectives, **options)
    assert recorder.races == []
    assert losses == plain, "the same bits as on a device without streams"


@pytest.mark.parametrize(
    ("stage", "wait"),
    [
        ("zero2", "_DeviceSide.follow"),
        ("zero2", "_DeviceSide.join"),
        ("zero2", "_DeviceEvent.wait"),
        ("zero3", "_DeviceSide.follow"),
        ("zero3", "_DeviceSide.join"),
        ("zero3", "_DeviceEvent.wait"),
    ],
)
def test_without_any_of_these_waits_something_does_not(monkeypatch, stage, wait) -> None:
    with recorded(monkeypatch) as recorder:
        name, method = wait.split(".")
        monkeypatch.setattr(getattr(streams, name), method, lambda self: None)
        train(monkeypatch, recorder, stage, collectives=stage == "zero2")
    assert recorder.races
