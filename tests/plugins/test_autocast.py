"""autocast and fp32 against torch.autocast and GradScaler by hand, and the guard that every precision brings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from dsx.testing import check_plugin, refuses
from dsx.testing.models import Tangle, tokens
from dsx.testing.plain import distance, largest, train_plain, weights_of
from dsx_precision.guard import OneRead

STEPS = 5
LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
Trained = tuple[list[float], list[float], dict[str, Tensor]]
"""Losses, scales after each update, weights."""


def manifest(layout: str, dtype: str) -> dict[str, Any]:
    scale = {"initial": 2.0**20, "window": 2} if dtype == "float16" else None
    precision: dict[str, Any] = {"use": ["autocast"], "autocast": {"dtype": dtype}}
    if scale:
        precision |= {"use": ["autocast", "dynamic_loss_scale"], "dynamic_loss_scale": scale}
    tables: dict[str, Any] = {"precision": precision}
    return tables if layout == "replicated" else tables | {"partition": {"use": [layout]}}


def train(layout: str, dtype: str) -> Trained:
    engine = dsx.prepare(Tangle(), manifest(layout, dtype))
    losses, scales = [], []
    for step in range(STEPS):
        engine.backward(engine(*tokens(step, 0, dist.get_rank())))
        report = engine.step()
        assert report.loss is not None
        losses.append(report.loss)
        scales.append(engine.program.scaler.value)
    weights = weights_of(engine)
    engine.close()
    return losses, scales, weights


def train_all(dtype: str) -> dict[str, Trained]:
    return {layout: train(layout, dtype) for layout in LAYOUTS}


def recipe(world: int, dtype: str) -> Trained:
    model = Tangle()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2, enabled=dtype == "float16")
    losses, scales = [], []
    for step in range(STEPS):
        total = 0.0
        for rank in range(world):
            with torch.autocast("cpu", getattr(torch, dtype)):
                loss = model(*tokens(step, 0, rank))
            scaler.scale(loss).backward()
            total += loss.item() / world
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad / world
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(total)
        scales.append(scaler.get_scale())
    return losses, scales, weights_of(model)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_it_is_torch_autocast_under_every_layout(ranks: Any, world: int, dtype: str) -> None:
    """A scale by which gradients in float16 overflow at first, as after each growth of it."""
    losses, scales, weights = recipe(world, dtype)
    assert len(set(scales)) == 1 if dtype == "bfloat16" else len(set(scales)) > 1
    for found in ranks.run(train_all, dtype, world=world, timeout=120):
        for layout in LAYOUTS:
            assert found[layout][1] == scales, layout
            assert largest(found[layout][0], losses) < 1e-6, layout
            assert distance(found[layout][2], weights) < 1e-6, layout


def test_parameters_masters_and_gradients_stay_fp32() -> None:
    model = nn.Linear(4, 4)
    engine = dsx.prepare(model, manifest("replicated", "bfloat16"))
    output = engine(torch.ones(2, 4))
    assert output.dtype == torch.bfloat16
    engine.backward(output.float().sum())
    engine.step()
    assert model.weight.dtype == torch.float32
    assert "master" not in engine.program.store.bytes()


def test_float16_without_a_scale_is_refused() -> None:
    table = {"use": ["autocast"], "autocast": {"dtype": "float16"}}
    refuses({"precision": table}, "put 'dynamic_loss_scale' beside 'autocast' in precision.use")
    refuses({"precision": {"use": ["autocast"], "autocast": {"dtype": "fp16"}}}, '"bfloat16" or "float16"')


@pytest.mark.parametrize(("name", "tolerance"), [("autocast", None), ("fp32", None), ("bf16", 0.1)])
def test_they_keep_their_contract(ranks: Any, name: str, tolerance: float | None) -> None:
    """Losses in bfloat16 are around 14, where the next number is 0.06 away."""
    check_plugin(name, ranks=ranks, tolerance=tolerance)


def test_fp32_is_what_core_does_by_itself() -> None:
    model, plain = Tangle(), Tangle()
    engine = dsx.prepare(model, {"precision": {"use": ["fp32"]}})
    losses = [engine.train_step([tokens(step, 0, 0)]).loss for step in range(STEPS)]
    assert losses == train_plain(plain, tokens, steps=STEPS)
    assert distance(weights_of(model), weights_of(plain)) == 0


@pytest.mark.parametrize("use", [["fp32"], ["bf16"], ["autocast"], ["fp16", "dynamic_loss_scale"]])
def test_every_precision_inspects_gradients_in_one_read(use: list[str]) -> None:
    engine = dsx.prepare(nn.Linear(3, 3), {"precision": {"use": use}})
    assert isinstance(engine.program.guard, OneRead)


@pytest.mark.parametrize("use", [["fp32"], ["bf16"], ["autocast"]])
def test_a_gradient_that_is_not_finite_moves_nothing(use: list[str]) -> None:
    """Cases 58, 63 and 64: neither weights, states, counters nor the learning rate."""
    schedule = {"use": ["warmup_linear"], "warmup_linear": {"warmup": 2, "total": 9}}
    engine = dsx.prepare(Tangle(), {"precision": {"use": use}, "optimize": schedule, "run": {"steps": 9}})
    rates = []
    for step in range(4):
        before = weights_of(engine)
        loss = engine(*tokens(step, 0, 0))
        engine.backward(loss * math.inf if step == 1 else loss)
        report = engine.step()
        rates += report.lr.values()
        assert (report.skipped, distance(weights_of(engine), before) == 0) == (step == 1, step == 1)
    assert (engine.steps, engine.skips, set(engine.counts)) == (3, 1, {0, 3})
    assert rates == pytest.approx([1e-3 * ratio for ratio in (1 / 2, 1, 6 / 7)])
    assert all(bool(tensor.isfinite().all()) for _, tensor in engine.program.layout.logical("exp_avg"))
