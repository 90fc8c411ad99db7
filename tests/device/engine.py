"""The engine on one GPU, under every layout, against plain PyTorch on the same GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dsx
from device.part import Checks, Figures
from dsx.testing.models import Tangle, tokens
from dsx.testing.plain import Batch, distance, largest, train_plain, weights_of
from dsx_text import gpt

STEPS, CLIP = 6, 0.5
LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
VOCABULARY = 64
LIMITS = {torch.float64: (1e-12, 1e-9), torch.float32: (1e-5, 1e-4)}
"""Largest distances of losses and of weights. fp32 products on a GPU differ in the last places with their shapes."""


def checks(device: str, argument: str | None) -> Checks:
    for layout in LAYOUTS:
        for dtype in LIMITS:
            for accumulation in (1, 3):
                words = f"{layout}, {name_of(dtype)}, {accumulation} micro-batches"
                yield words, partial(is_plain, layout, dtype, accumulation, device)
        yield f"{layout}, saved and resumed", partial(resumes, layout, device)
        yield f"{layout}, an infinite loss is skipped", partial(skips, layout, device)
        for precision in ("bf16", "autocast"):
            yield f"{layout}, {precision}", partial(learns, layout, precision, device)


def small_gpt() -> nn.Module:
    """A GPT that returns its loss, the same in every call."""
    torch.manual_seed(11)
    return Loss(gpt(vocab=VOCABULARY, layers=2, width=64, heads=4, context=32))


class Loss(nn.Module):
    """(ids) -> the loss of predicting each next one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids)["loss"]
        return loss


def ids_on(device: str) -> Callable[[int, int, int], Batch]:
    def data(step: int, micro: int, rank: int) -> Batch:
        generator = torch.Generator().manual_seed(1_000_000 * step + 1_000 * micro + rank)
        return (torch.randint(0, VOCABULARY, (4, 32), generator=generator).to(device),)

    return data


def tokens_on(device: str) -> Callable[[int, int, int], Batch]:
    return lambda step, micro, rank: tuple(tensor.to(device) for tensor in tokens(step, micro, rank))


def manifest(layout: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    partition = {} if layout == "replicated" else {"partition": {"use": [layout]}}
    return {**partition, "optimize": {"clip_norm": CLIP}, **sections}


def train(
    model: nn.Module, data: Callable[[int, int, int], Batch], wanted: dict[str, Any], rank: int = 0, **more: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all updates, and the weights after them."""
    accumulation = wanted.get("batch", {}).get("accumulation", 1)
    engine = dsx.prepare(model, wanted, **more)
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            engine.backward(engine(*data(step, micro, rank)))
            report = engine.step()
        assert report.stepped and report.loss is not None, f"update {step} was not made: {report}"
        losses.append(report.loss)
    weights = weights_of(engine)
    engine.close()
    return losses, weights


def assert_plain(
    found: tuple[list[float], dict[str, Tensor]],
    make: Callable[[], nn.Module],
    data: Any,
    dtype: torch.dtype,
    **more: Any,
) -> Figures:
    """`make` trained by a plain loop ends where `found` does."""
    model = make()
    losses = train_plain(model, data, steps=STEPS, clip_norm=CLIP, **more)
    of_losses, of_weights = largest(found[0], losses), distance(found[1], weights_of(model))
    limits = LIMITS[dtype]
    assert of_losses < limits[0], f"losses are {of_losses:.2e} apart, under {limits[0]:.0e} wanted"
    assert of_weights < limits[1], f"weights are {of_weights:.2e} apart, under {limits[1]:.0e} wanted"
    return {"losses apart": f"{of_losses:.1e}", "weights apart": f"{of_weights:.1e}"}


def is_plain(layout: str, dtype: torch.dtype, accumulation: int, device: str) -> Figures:
    """Tied, frozen, unused, empty and odd parameters in fp64; a GPT in fp32, where attention has kernels of its own."""
    kind, data = (Tangle, tokens_on(device)) if dtype == torch.float64 else (small_gpt, ids_on(device))

    def make() -> nn.Module:
        return kind().to(device, dtype)

    found = train(make(), data, manifest(layout, batch={"accumulation": accumulation}))
    return assert_plain(found, make, data, dtype, accumulation=accumulation)


def resumes(layout: str, device: str) -> Figures:
    """Two updates, saved, one more: the same bits as loaded, one more."""
    data = ids_on(device)
    with tempfile.TemporaryDirectory(prefix="dsx_device_") as folder:
        first = dsx.prepare(small_gpt().to(device), manifest(layout))
        for step in range(2):
            _update(first, data(step, 0, 0))
        first.save(Path(folder, "checkpoint"))
        second = dsx.prepare(small_gpt().to(device), manifest(layout))
        second.load(Path(folder, "checkpoint"))
        for engine in (first, second):
            _update(engine, data(2, 0, 0))
        apart = distance(weights_of(second), weights_of(first))
        first.close()
        second.close()
    assert apart < LIMITS[torch.float32][0], f"the resumed run is {apart:.2e} away"
    return None


def skips(layout: str, device: str) -> Figures:
    data = ids_on(device)
    engine = dsx.prepare(small_gpt().to(device), manifest(layout))
    _update(engine, data(0, 0, 0))
    before = weights_of(engine)
    engine.backward(engine(*data(1, 0, 0)) * float("inf"))
    report = engine.step()
    assert report.skipped and not report.stepped, f"it was not skipped: {report}"
    assert distance(weights_of(engine), before) == 0, "the weights have changed"
    engine.close()
    return None


def learns(layout: str, precision: str, device: str) -> Figures:
    """One batch thirty times: the loss ends within 5 % of fp32's."""
    ends = []
    for sections in ({}, {"precision": {"use": [precision]}}):
        engine = dsx.prepare(small_gpt().to(device), manifest(layout, **sections))
        for _ in range(30):
            report = _update(engine, ids_on(device)(0, 0, 0))
        ends.append(report.loss)
        engine.close()
    assert abs(ends[1] / ends[0] - 1) < 0.05, f"ends at {ends[1]:.4f}, fp32 at {ends[0]:.4f}"
    return {"end": f"{ends[1]:.4f}", "fp32": f"{ends[0]:.4f}"}


def _update(engine: dsx.Engine, batch: Batch) -> Any:
    engine.backward(engine(*batch))
    return engine.step()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
