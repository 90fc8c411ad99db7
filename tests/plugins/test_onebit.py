"""`onebit_adam` against the algorithm of its paper, in float64; bytes, resume, layouts, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.testing import distance, largest, refuses, weights_of
from dsx.testing.models import Tangle, tokens
from plugins.onebit_plain import Numbers
from plugins.onebit_plain import train as plain

STEPS = 8


def manifest(n: dict[str, Any], **more: Any) -> dict[str, Any]:
    clip = {"clip_norm": more.pop("clip_norm")} if "clip_norm" in more else {}
    return {"optimize": {"use": ["onebit_adam"], "onebit_adam": n, **clip}, **more}


def batch(step: int, micro: int, rank: int, side: str = "") -> tuple[Any, ...]:
    """`turns`: a branch that another rank takes in each step."""
    return (*tokens(step, micro, rank), side == "turns" and rank == step % 2)


def train(n: dict[str, Any], steps: int = STEPS, side: str = "", **more: Any) -> tuple[list[float], dict[str, Tensor]]:
    accumulation = more.get("batch", {}).get("accumulation", 1)
    engine = dsx.prepare(Tangle().double(), manifest(n, **more))
    losses = []
    for step in range(steps):
        report = engine.train_step(batch(step, micro, dist.get_rank(), side) for micro in range(accumulation))
        losses.append(report.loss)
    weights = weights_of(engine)
    engine.close()
    return losses, weights


@pytest.mark.parametrize(
    ("world", "signs", "accumulation", "clip_norm", "side"),
    [
        (2, "scaled", 1, None, ""),
        (3, "momentum", 1, None, ""),
        (3, "scaled", 2, 0.5, "turns"),
        (4, "momentum", 1, 0.5, "turns"),
    ],
)
def test_the_papers_algorithm_in_float64(ranks, world, signs, accumulation, clip_norm, side) -> None:
    """Tied, frozen, unused and empty parameters, a branch that ranks take in turns; padding has no part in scales."""
    n: dict[str, Any] = {"freeze": 3, "signs": signs, "lr": 3e-3, "betas": [0.9, 0.95]}
    more: dict[str, Any] = {"batch": {"accumulation": accumulation}}
    if clip_norm:
        more["clip_norm"] = clip_norm
    found = ranks.run(train, n, side=side, world=world, **more)
    model = Tangle().double()
    numbers = Numbers(freeze=3, signs=signs, lr=3e-3, betas=(0.9, 0.95), clip_norm=clip_norm or float("inf"))
    losses = plain(
        model, lambda *at: batch(*at, side), numbers, world=world, steps=STEPS, accumulation=accumulation
    )
    for each_losses, weights in found:
        assert all(torch.equal(tensor, found[0][1][name]) for name, tensor in weights.items()), "ranks differ"
        assert largest(each_losses, losses) < 1e-9
        assert distance(weights, weights_of(model)) < 1e-9
