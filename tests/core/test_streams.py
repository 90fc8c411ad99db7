"""Sides and events: free where a device has no streams, and in order where it has."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.contracts import PASSED, Event, Side, pinned
from dsx.contracts import streams as module
from happens_before import Recorder, recorded

CPU = torch.device("cpu")


@pytest.fixture
def recorder(monkeypatch):
    with recorded(monkeypatch) as made:
        yield made


def race(recorder: Recorder, words: str) -> bool:
    """Whether just one was found, with these words."""
    recorder.look()
    return len(recorder.races) == 1 and words in recorder.races[0]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_device_without_streams_costs_nothing(device: str) -> None:
    side = Side.of(torch.device(device))
    assert side.beside() is side.beside() is Side.of(CPU).within(), "not even a context is made"
    assert Event.now(torch.device(device)) is PASSED is side.mark()
    side.follow(), side.after(PASSED), side.join(), PASSED.wait(), PASSED.synchronize()
    assert not pinned(3, torch.bfloat16, torch.device(device)).is_pinned()


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_accelerators_have_them(device: str) -> None:
    found = module._module(torch.device(device))
    assert found is torch.get_device_module(device)
    assert all(hasattr(found, name) for name in ("Stream", "Event", "stream", "current_stream"))


def test_what_a_side_wrote_is_waited_for(recorder: Recorder) -> None:
    side, tensor = Side.of(CPU), torch.zeros(4)
    with side.beside():
        tensor.add_(1)
    side.mark().wait()
    tensor.add_(1)
    assert not recorder.races


def test_or_is_a_race(recorder: Recorder) -> None:
    side, tensor = Side.of(CPU), torch.zeros(4)
    with side.beside():
        tensor[:2].add_(1)
    tensor[2:].add_(1)
    assert not recorder.races, "other bytes"
    tensor[1:3].sum()
    assert race(recorder, "sum.default of default does not wait for aten.add_.Tensor of side 1")


def test_a_side_waits_for_what_came_before_it_if_it_is_told(recorder: Recorder) -> None:
    side, tensor = Side.of(CPU), torch.zeros(4)
    side.follow()
    tensor.add_(1)
    with side.within():
        tensor.clone()
    assert race(recorder, "clone.default of side 1 does not wait for aten.add_.Tensor of default")


def test_an_event_is_a_point_and_not_all_that_follows(recorder: Recorder) -> None:
    side, tensor = Side.of(CPU), torch.zeros(4)
    with side.beside():
        tensor.add_(1)
        early = side.mark()
        tensor.add_(1)
    early.wait()
    tensor.clone()
    assert race(recorder, "clone.default of default does not wait")


def test_a_host_waits_for_its_own_memory(monkeypatch) -> None:
    with recorded(monkeypatch, "meta") as recorder:
        side, far = Side.of(torch.device("meta")), torch.zeros(4, device="meta")
        for waits in (True, False):
            near = pinned(4, torch.float32, torch.device("meta"))
            with side.beside():
                near.copy_(far, non_blocking=True)
            if waits:
                side.mark().synchronize()
            near.sum()
            assert bool(recorder.races) is not waits
        assert race(recorder, "of host does not wait for aten.copy_.default of side 1")


def test_memory_is_given_back_when_its_stream_has_waited_for_its_readers(recorder: Recorder) -> None:
    side = Side.of(CPU)
    for waits in (True, False):
        tensor = torch.zeros(4)
        with side.beside():
            tensor.sum()
        if waits:
            side.join()
        del tensor
        recorder.look()
        assert bool(recorder.races) is not waits
    assert race(recorder, "memory of default is given back while aten.sum.default of side 1 uses it")


Step = tuple[str, int, int, bool]
"""("use", stream, tensor, whether it writes), or ("wait", a stream, what it waits for, -)."""

STEPS = st.tuples(st.sampled_from(["use", "use", "wait"]), st.integers(0, 2), st.integers(0, 2), st.booleans())


def unordered(steps: list[Step]) -> bool:
    """Whether two uses of a tensor, one of them writing, have no path of waits between them."""
    last: dict[int, int] = {}
    before: list[set[int]] = []  # of each step, all that are over before it
    for number, (kind, stream, other, _) in enumerate(steps):
        roots = [last.get(stream), last.get(other) if kind == "wait" else None]
        before.append({old for root in roots if root is not None for old in (root, *before[root])})
        last[stream] = number
    return any(
        "use" == one[0] == two[0] and one[2] == two[2] and (one[3] or two[3]) and first not in before[second]
        for second, two in enumerate(steps)
        for first, one in enumerate(steps[:second])
    )


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, min_size=3, max_size=14))
def test_a_race_is_found_where_no_path_of_waits_orders_two_uses(steps: list[Step]) -> None:
    with pytest.MonkeyPatch.context() as patch, recorded(patch) as recorder:
        streams = [recorder.current_stream(), recorder.Stream(), recorder.Stream()]
        tensors = [torch.empty(2) for _ in range(3)]
        for kind, stream, other, writes in steps:
            with recorder.stream(streams[stream]):
                if kind == "wait":
                    streams[stream].wait_stream(streams[other])
                else:
                    recorder.touch([tensors[other]], [tensors[other]] if writes else [], "use")
        assert bool(recorder.races) == unordered(steps)
