"""Offload on a device with streams: copies of states are ordered, and each of the waits that do so is needed."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dsx
from dsx.contracts import Event, streams
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing.models import Tangle, tokens
from dsx_kernels.aio import Files, missing
from dsx_offload.buffers import Buffers
from dsx_offload.claims import Claims, TierOptions
from dsx_offload.disk import FileTier
from dsx_offload.host import HostTier
from happens_before import CollectivesPlugin, Recorder, Stream, Timeline, recorded

DEVICE = torch.device("cpu", 0)
"""The CPU, and yet another device than the one that tensors say they are on: so it is one apart from the host's."""

STATES = {"zero1": ("optimizer",), "zero2": ("optimizer", "grad"), "zero3": ("optimizer", "grad", "param")}


class Far(HostTier):
    def grain(self, key: str) -> int:
        return 96


class FarFiles(FileTier):
    def create(self, key: str, name: str, tensor: Tensor) -> None:
        Event.now(DEVICE).synchronize()  # as a copy to the host does
        super().create(key, name, tensor)


class FarPlugin:
    """A tier whose device is `DEVICE`: of the host's memory, or of files in a folder."""

    descriptor = Descriptor(name="far", section="partition", contract=1, fills={"tiers": Fill()})

    def __init__(self, states: tuple[Any, ...], update: Any, open_files: Any = None) -> None:
        self._options, self._open = TierOptions(states=states, update=update), open_files

    @hook
    def dsx_partition(self) -> list[Part]:
        return [Part("tiers", lambda ctx: self._tier(DEVICE if ctx.plan.device.type == "cpu" else ctx.plan.device))]

    def _tier(self, device: torch.device) -> HostTier | FileTier:
        """`device`: or, for a plan on paper, meta."""
        claims, update = Claims(self._options), self._options.update
        if self._open is None:
            return Far(claims, device, update=update, piece_bytes=1 << 10)
        return FarFiles(claims, device, open_files=self._open, room=lambda: 1 << 40, update=update, piece_bytes=4096)


class Noted:
    """Files whose transfers are noted as the host's reads and writes of buffers."""

    def __init__(self, recorder: Recorder, folder: str, size: int) -> None:
        self._recorder, self._files = recorder, Files([folder], size)

    def read(self, offset: int, buffer: Tensor) -> Any:
        self._recorder.touch([], [buffer], "a read from a file", self._recorder.host)
        return self._files.read(offset, buffer)

    def write(self, offset: int, buffer: Tensor) -> Any:
        self._recorder.touch([buffer], [], "a write to a file", self._recorder.host)
        return self._files.write(offset, buffer)

    def close(self) -> None:
        self._files.close()


def train(
    recorder: Recorder | None, stage: str, tier: FarPlugin | None, accumulation: int = 1, **optimize: Any
) -> list[float]:
    """Losses of four updates."""
    plugins: dict[str, Any] = {"recorded": CollectivesPlugin(recorder)} if recorder else {}
    if tier is not None:
        plugins["far"] = tier
    manifest = {
        "partition": {"use": [stage, *(["far"] if tier else [])]},
        "communicate": {"use": ["recorded"] if recorder else []},
        "batch": {"accumulation": accumulation},
        "optimize": {"clip_norm": 0.5, **optimize},
    }
    engine = dsx.prepare(Tangle(width=16), manifest, plugins=plugins)
    steps = [[tokens(step, micro, 0) for micro in range(accumulation)] for step in range(4)]
    losses = [engine.train_step(batches).loss for batches in steps]
    engine.close()
    return losses


@pytest.fixture
def on_the_heap(monkeypatch) -> Iterator[None]:
    """zero3's parameters keep their memory; test_zero_streams.py has those that come and go."""
    monkeypatch.setattr("dsx_zero.sharded_gradients.comes_back", lambda device: False)
    return


CASES = [(stage, update, k) for stage in STATES for update in ("host", "device") for k in (1, 2)]


@pytest.mark.parametrize(("stage", "update", "accumulation"), CASES)
def test_host_memory_is_read_and_written_in_order(monkeypatch, on_the_heap, stage, update, accumulation) -> None:
    plain = train(None, stage, None, accumulation)
    with recorded(monkeypatch) as recorder:
        losses = train(recorder, stage, FarPlugin(STATES[stage], update), accumulation)
    assert recorder.races == []
    assert losses == plain, "the same bits as without the tier"


@pytest.mark.parametrize("wait", ["_DeviceSide.follow", "_DeviceSide.after", "_DeviceEvent.wait"])
def test_without_any_of_these_waits_something_is_not(monkeypatch, on_the_heap, wait) -> None:
    name, method = wait.split(".")
    with recorded(monkeypatch) as recorder:
        monkeypatch.setattr(getattr(streams, name), method, lambda self, *event: None)
        train(recorder, "zero1", FarPlugin(STATES["zero1"], "device"))
    assert recorder.races


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("stage", STATES)
def test_a_buffer_goes_to_a_file_when_a_device_has_filled_it(monkeypatch, on_the_heap, tmp_path, stage) -> None:
    plain = train(None, stage, None)
    with recorded(monkeypatch) as recorder:
        tier = FarPlugin(STATES[stage], "device", partial(Noted, recorder, str(tmp_path)))
        losses = train(recorder, stage, tier)
    assert recorder.races == []
    assert losses == plain, "the same bits as without the tier"


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_which_a_host_that_does_not_wait_breaks(monkeypatch, on_the_heap, tmp_path) -> None:
    with recorded(monkeypatch) as recorder:
        monkeypatch.setattr(streams._DeviceEvent, "synchronize", lambda self: None)
        train(recorder, "zero1", FarPlugin(STATES["zero1"], "device", partial(Noted, recorder, str(tmp_path))))
    assert any("a write to a file of host does not wait for aten.copy_" in words for words in recorder.races)
    assert any("a read from a file of host does not wait for aten.copy_" in words for words in recorder.races)


def test_a_buffer_is_taken_again_when_it_was_read() -> None:
    waited = []

    class Reading(Event):
        def synchronize(self) -> None:
            waited.append(self)

    buffers, reading = Buffers(1 << 20, torch.device("cpu")), Reading()
    first = buffers.take(5000)
    buffers.give(first, reading)
    assert waited == [], "whoever gives it back goes on"
    assert buffers.take(8000) is first
    assert waited == [reading]


class Beside:
    """An executor that runs what it is given at once, as by a thread with a stream of its own."""

    recorder: Recorder

    def __init__(self, *_: object, **__: object) -> None:
        self._stream = Stream(self.recorder, Timeline("the thread's"))

    def submit(self, function: Any, *arguments: Any) -> Future[None]:
        with self.recorder.stream(self._stream):
            function(*arguments)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def shutdown(self) -> None:
        pass


EARLY = {"use": ["adamw", "early_update"], "clip_norm": 1e9}


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("stage", STATES)
def test_an_early_update_has_a_stream_of_its_own(monkeypatch, on_the_heap, tmp_path, stage) -> None:
    plain = train(None, stage, None, use=["adamw"], clip_norm=1e9)
    with recorded(monkeypatch) as recorder:
        monkeypatch.setattr(Beside, "recorder", recorder, raising=False)
        monkeypatch.setattr("dsx_offload.early_update.ThreadPoolExecutor", Beside)
        tier = FarPlugin(STATES[stage], "device", partial(Noted, recorder, str(tmp_path)))
        losses = train(recorder, stage, tier, **EARLY)
    assert recorder.races == []
    assert losses == plain


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(
    ("wait", "instead"),
    [("within", lambda self: nullcontext()), ("follow", lambda self: None)],
)
def test_or_it_races_with_the_backward(monkeypatch, on_the_heap, tmp_path, wait, instead) -> None:
    with recorded(monkeypatch) as recorder:
        monkeypatch.setattr(Beside, "recorder", recorder, raising=False)
        monkeypatch.setattr("dsx_offload.early_update.ThreadPoolExecutor", Beside)
        monkeypatch.setattr(streams._DeviceSide, wait, instead)
        tier = FarPlugin(STATES["zero1"], "device", partial(Noted, recorder, str(tmp_path)))
        train(recorder, "zero1", tier, **EARLY)
    assert recorder.races


LATE = {"use": ["delayed_update"], "delayed_update": {"after": 1}}


@pytest.mark.parametrize("stage", STATES)
def test_a_delayed_update_has_a_stream_of_its_own(monkeypatch, on_the_heap, stage) -> None:
    plain = train(None, stage, None, **LATE)
    with recorded(monkeypatch) as recorder:
        monkeypatch.setattr(Beside, "recorder", recorder, raising=False)
        monkeypatch.setattr("dsx_offload.delayed_update.ThreadPoolExecutor", Beside)
        losses = train(recorder, stage, FarPlugin(STATES[stage], "device"), **LATE)
    assert recorder.races == []
    assert losses == plain


@pytest.mark.parametrize(("wait", "instead"), [("within", lambda self: nullcontext()), ("join", lambda self: None)])
def test_or_it_races_with_the_next_step(monkeypatch, on_the_heap, wait, instead) -> None:
    with recorded(monkeypatch) as recorder:
        monkeypatch.setattr(Beside, "recorder", recorder, raising=False)
        monkeypatch.setattr("dsx_offload.delayed_update.ThreadPoolExecutor", Beside)
        monkeypatch.setattr(streams._DeviceSide, wait, instead)
        train(recorder, "zero1", FarPlugin(STATES["zero1"], "device"), **LATE)
    assert recorder.races


def test_small_buffers_are_parts_of_a_huge_page() -> None:
    buffers = Buffers(8 << 20, torch.device("cpu"))
    several = [buffers.take(1 << 20) for _ in range(3)]
    assert [part.numel() for part in several] == [1 << 20] * 3
    assert several[0].untyped_storage().data_ptr() == several[1].untyped_storage().data_ptr()
    assert len({part.data_ptr() for part in several}) == 3
    assert buffers.bytes == 2 * (2 << 20), "of two pages, the last half of which is unused"
    odd = buffers.take(300_000)
    assert 300_000 <= odd.numel() < 600_000 and odd.data_ptr() % 4096 == 0
    before = buffers.bytes
    for part in (*several, odd):
        buffers.give(part)
    assert buffers.take(1 << 20).numel() == 1 << 20 and buffers.bytes == before
    assert buffers.take(4096).numel() == 4096 and buffers.bytes == before + 4096
    buffers.clear()
    assert buffers.bytes == (1 << 20) + 4096, "what is still used"
