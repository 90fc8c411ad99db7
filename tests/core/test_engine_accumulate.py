"""`engine.accumulate(sync=False)`: whole gradients instead of reductions in each micro-batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.testing import CountingPlugin
from dsx.testing.models import Tangle, tokens
from dsx.testing.plain import distance, largest, train_plain, weights_of

LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
K, STEPS = 3, 3
KEPT = {"until the last": (0, 1), "the last too": (0, 1, 2), "the first": (0,), "the last": (2,)}
"""Micro-batches of a window whose gradients are kept."""


def manifest(layout: str) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "batch": {"accumulation": K},
        "optimize": {"clip_norm": 0.5},
        "communicate": {"use": ["counting"]},
    }
    return sections if layout == "replicated" else {**sections, "partition": {"use": [layout]}}


def prepare(layout: str) -> dsx.Engine:
    return dsx.prepare(Tangle().double(), manifest(layout), plugins={"counting": CountingPlugin()})


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor, bool]:
    """Rank 0 takes a branch in the first micro-batch of every other window."""
    return (*tokens(step, micro, rank), rank == 0 and micro == 0 and step % 2 == 0)


Found = tuple[list[float], dict[str, Tensor]]


def train(layout: str, kept: tuple[int, ...], close: int = K) -> Found:
    rank, losses = dist.get_rank(), []
    engine = prepare(layout)
    for step in range(STEPS):
        for micro in range(close):
            with engine.accumulate(sync=micro not in kept):
                engine.backward(engine(*batch(step, micro, rank)))
            report = engine.step(close=micro == close - 1)
        losses.append(report.loss)
    return losses, weights_of(engine)


def train_each(layout: str) -> dict[str, Found]:
    return {name: train(layout, kept) for name, kept in KEPT.items()}


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_the_same(ranks, layout: str, world: int) -> None:
    model = Tangle().double()
    losses = train_plain(model, batch, steps=STEPS, world=world, accumulation=K, clip_norm=0.5)
    for found in ranks.run(train_each, layout, world=world):
        for name, (rank_losses, weights) in found.items():
            assert largest(rank_losses, losses) < 1e-12, name
            assert distance(weights, weights_of(model)) < 1e-9, name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_window_that_is_closed_early_reduces_what_was_kept(ranks, layout: str) -> None:
    model = Tangle().double()
    losses = train_plain(model, batch, steps=STEPS, world=2, accumulation=2, clip_norm=0.5)
    for rank_losses, weights in ranks.run(train, layout, (0, 1), 2, world=2):
        assert largest(rank_losses, losses) < 1e-12
        assert distance(weights, weights_of(model)) < 1e-9


def without_data(layout: str) -> dict[str, Tensor]:
    """The last rank has data in the first micro-batch only."""
    rank = dist.get_rank()
    engine = prepare(layout)
    for step in range(STEPS):
        for micro in range(K):
            with engine.accumulate(sync=micro == 1):
                if rank == 0 or micro == 0:
                    engine.backward(engine(*tokens(step, micro, rank)))
                engine.step()
    return weights_of(engine)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_without_data_takes_part(ranks, layout: str) -> None:
    model = Tangle().double()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(STEPS):
        parts = [(micro, rank) for rank in range(2) for micro in range(K) if rank == 0 or micro == 0]
        for micro, rank in parts:
            (model(*tokens(step, micro, rank)) / len(parts)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for weights in ranks.run(without_data, layout, world=2):
        assert distance(weights, weights_of(model)) < 1e-9


def sent(layout: str, kept: tuple[int, ...]) -> list[int]:
    """Bytes of gradients that this rank sends in each micro-batch, and in the update, of the second window."""
    rank, found = dist.get_rank(), []
    engine = prepare(layout)
    for step in range(2):
        for micro in range(K):
            for call in ("backward", "step"):
                before = engine.program.transport.bytes["reduce"]
                if call == "backward":
                    with engine.accumulate(sync=micro not in kept):
                        engine.backward(engine(*tokens(step, micro, rank)))
                else:
                    engine.step()
                found.append(engine.program.transport.bytes["reduce"] - before)
    elements = sum(shard.flat.size for shard in engine.program.layout.shards)
    return [8 * elements, *found[2 * K :]]


@pytest.mark.parametrize(
    ("layout", "kept", "whole"),
    [
        # in whole gradients that a reduce-scatter sends; an all-reduce is two
        ("replicated", (), [0, 0, 0, 0, 2, 0]),
        ("replicated", (0, 1), [0, 0, 0, 0, 2, 0]),
        ("replicated", (0, 1, 2), [0, 0, 0, 0, 0, 2]),
        ("zero1", (0, 1), [0, 0, 0, 0, 1, 0]),
        ("zero1", (0, 1, 2), [0, 0, 0, 0, 0, 1]),
        ("zero2", (), [1, 0, 1, 0, 1, 0]),
        ("zero2", (0, 1), [0, 0, 0, 0, 1, 0]),
        ("zero2", (0, 1, 2), [0, 0, 0, 0, 0, 1]),
        ("zero2", (0, 2), [0, 0, 1, 0, 0, 1]),
        ("zero3", (0, 1), [0, 0, 0, 0, 1, 0]),
    ],
)
def test_bytes_are_sent_where_it_says(ranks, layout: str, kept: tuple[int, ...], whole: list[int]) -> None:
    for size, *found in ranks.run(sent, layout, kept, world=3):
        assert found == [count * size * 2 // 3 for count in whole]


def test_contexts_nest_and_end() -> None:
    engine = prepare("replicated")
    with engine.accumulate():
        assert not engine._sync
        with engine.accumulate(sync=True):
            assert engine._sync
        assert not engine._sync
    with pytest.raises(ValueError, match="here"), engine.accumulate():
        raise ValueError("here")
    assert engine._sync
