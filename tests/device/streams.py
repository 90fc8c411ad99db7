"""Side streams on one GPU: slow ones change nothing, they do overlap, and a step makes the host wait once."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch

import dsx
from device import engine, offload
from device.engine import LAYOUTS, Loss, ids_on, manifest, small_gpt
from device.part import Checks, Figures
from dsx.contracts import Side, streams
from dsx_text import gpt

CYCLES = 2_000_000
"""Of a GPU's clock, some milliseconds: much longer than any work of the small models."""


def checks(device: str, argument: str | None) -> Checks:
    """`overlap`: what is timed."""
    yield from _overlap(device) if argument == "overlap" else _order(device)


def _order(device: str) -> Checks:
    slowly = slow if device == "cuda" else nullcontext
    for layout in LAYOUTS:
        for accumulation in (1, 3):
            run = partial(engine.is_plain, layout, torch.float32, accumulation, device)
            yield f"{layout}, {accumulation} micro-batches, slow sides", partial(_within, slowly, run)
        for tier in ("cpu_offload", "nvme_offload"):
            for update in ("host", "device"):
                run = partial(offload.is_the_same, layout, tier, update, device)
                yield f"{layout}, {tier}, update on the {update}, slow sides", partial(_within, slowly, run)
        late = partial(offload.is_as_late, layout, device)
        yield f"{layout}, delayed_update, slow sides", partial(_within, slowly, late)
        for states in ([], offload.STATES.get(layout, ["optimizer"])) if device == "cuda" else ():
            words = f"with {', '.join(states)} on the host" if states else "on the device"
            yield f"{layout}, {words}: waits of the host", partial(_waits_once, layout, states)
    if device == "cuda":
        yield "a slow side that nothing waits for shows", _a_missing_wait_shows


def _overlap(device: str) -> Checks:
    if device != "cuda":
        yield "a device without streams has no sides", lambda: _has_none(device)
        return
    yield "copies of offloaded states, both ways at once", partial(_overlaps, "zero1", {"update": "device"}, 0.9)
    everything: dict[str, Any] = {"update": "device", "states": ["optimizer", "grad", "param"]}
    yield "gathers of offloaded parameters beside the model", partial(_overlaps, "zero3", everything, 0.95)


def _has_none(device: str) -> Figures:
    assert type(Side.of(torch.device(device))) is Side, f"{device} has a side stream"
    return None


@contextmanager
def slow() -> Iterator[None]:
    """Every side sleeps before each piece of its work: what does not wait for it comes much too early."""
    within = streams._DeviceSide.within

    def sleepy(side: Any) -> AbstractContextManager[None]:
        with within(side):
            torch.cuda._sleep(CYCLES)
        return within(side)

    with mock.patch.object(streams._DeviceSide, "within", sleepy):
        yield


def _within(context: Callable[[], AbstractContextManager[None]], run: Callable[[], Figures]) -> Figures:
    with context():
        return run()


def _a_missing_wait_shows() -> Figures:
    """That sleep is long enough: without events the losses are others, or no numbers."""
    try:
        with slow(), mock.patch.object(streams._DeviceEvent, "wait"):
            engine.is_plain("zero3", torch.float32, 1, "cuda")
    except (AssertionError, dsx.DsxError):
        return None
    raise AssertionError("zero3 trains as plain PyTorch although nothing waits for its gathers")


def _waits_once(layout: str, states: list[str]) -> Figures:
    """Forward and backward make the host wait for nothing, `step` for the vote alone."""
    tiers = {"cpu_offload": {"states": states, "update": "device", "piece_bytes": 1 << 16}} if states else {}
    wanted = manifest(layout)
    wanted["partition"] = {"use": [*([] if layout == "replicated" else [layout]), *tiers], **tiers}
    made, data = dsx.prepare(small_gpt().cuda(), wanted), ids_on("cuda")
    for step in range(2):  # the first ones share orders, and compile kernels
        made.backward(made(*data(step, 0, 0)))
        made.step()
    batch = data(2, 0, 0)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        made.backward(made(*batch))
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made.close()
    waits = [f"{found.filename}:{found.lineno}" for found in caught if "synchronizing" in str(found.message)]
    assert len(waits) == 1, f"step() makes the host wait at {', '.join(waits) or 'no place: the vote is not read?'}"
    return None


def _overlaps(layout: str, options: dict[str, Any], most: float) -> Figures:
    """A step takes less time than with all on one stream."""
    times: dict[str, float] = {}
    ids = torch.randint(0, 256, (8, 512), device="cuda")
    for name in ("sides", "one stream", "sides again"):
        one = mock.patch.object(Side, "of", return_value=Side())
        with one if name == "one stream" else nullcontext():
            torch.manual_seed(0)
            model = Loss(gpt(vocab=256, context=512, layers=12, width=1024, heads=16)).cuda()
            wanted = manifest(layout, precision={"use": ["bf16"]}, optimize={"use": ["adamw"]})
            wanted["partition"] = {"use": [layout, "cpu_offload"], "cpu_offload": options}
            made = dsx.prepare(model, wanted)
            times[name] = statistics.median(_milliseconds(made, ids) for _ in range(8))
            made.close()
            del made, model
            torch.cuda.empty_cache()
    ratio = max(times["sides"], times["sides again"]) / times["one stream"]
    assert ratio < most, f"{ratio:.3f} of the time on one stream, under {most} wanted: {times}"
    return {**{f"{name} ms": round(value, 2) for name, value in times.items()}, "ratio": round(ratio, 3)}


def _milliseconds(made: dsx.Engine, ids: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    made.backward(made(ids))
    made.step()
    made.quiesce()
    made.program.store.drain()  # copies to the host have arrived
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))
