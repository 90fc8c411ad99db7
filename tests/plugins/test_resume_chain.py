"""One training through every stage and several world sizes: each resume goes on as if nothing had happened."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from safetensors.torch import load_file
from torch import Tensor

import dsx
from dsx.run.job import run
from dsx.testing import distance
from dsx.testing.models import Tangle, tokens

CHAIN = (("zero2", 2, 2), ("zero3", 3, 1), ("replicated", 1, 3), ("zero1", 4, 1))
"""Layout, ranks, micro-batches; always of the same twelve samples."""

EACH, SAMPLES = 3, 12
KINDS: Mapping[str, tuple[torch.dtype, float]] = {
    "fp64": (torch.float64, 1e-12),
    "fp32": (torch.float32, 1e-6),
    "bf16": (torch.float32, 2.0**-6),
}
"""Dtype of the model that is given, and how far a run may be off. bf16 has 8 bits, which round each micro-batch's loss
and gradients; but what is loaded has all bits, of the fp32 masters."""


@frozen
class Seen:
    """What there is after an update."""

    loss: float
    lr: float
    counts: tuple[int, ...]
    tensors: dict[str, Tensor]


def prepare(kind: str, layout: str, accumulation: int, seed: int) -> dsx.Engine:
    manifest: dict[str, Any] = {
        "optimize": {"use": ["adamw", "warmup_cosine"], "warmup_cosine": {"warmup": 7}, "clip_norm": 0.7},
        "batch": {"accumulation": accumulation},
        "run": {"steps": len(CHAIN) * EACH},
    }
    if layout != "replicated":
        manifest["partition"] = {"use": [layout]}
    if kind == "bf16":
        manifest["precision"] = {"use": ["bf16"]}
    return dsx.prepare(Tangle(seed=seed).to(KINDS[kind][0]), manifest)


def window(step: int, accumulation: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's micro-batches of an update."""
    rank, world = dist.get_rank(), dist.get_world_size()
    each = SAMPLES // (accumulation * world)
    for micro in range(accumulation):
        first = (micro * world + rank) * each
        parts = [tokens(step, 0, sample, 1) for sample in range(first, first + each)]
        yield torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def tensors(engine: dsx.Engine) -> dict[str, Tensor]:
    """Weights and states."""
    found = {f"weight {name}": tensor.clone() for name, tensor in engine.weights()}
    for state in engine.program.rule.states:
        logical = engine.program.layout.logical(state.name)
        found |= {f"{state.name} {name}": tensor.clone() for name, tensor in logical}
    return found


def go_on(kind: str, place: int, folder: str) -> tuple[dict[str, Tensor], list[Seen]]:
    """One link of the chain: what was there first, and after each update."""
    layout, _, accumulation = CHAIN[place]
    engine = prepare(kind, layout, accumulation, seed=place)
    if place:
        engine.load(f"{folder}/{place - 1}")
    first = tensors(engine)
    seen = updates(engine, range(place * EACH, (place + 1) * EACH))
    engine.save(f"{folder}/{place}")
    engine.close()
    return first, seen


def uninterrupted(kind: str) -> list[Seen]:
    """All of it in one process that holds everything."""
    engine = prepare(kind, "replicated", 1, seed=0)
    return updates(engine, range(len(CHAIN) * EACH))


def updates(engine: dsx.Engine, steps: range) -> list[Seen]:
    seen = []
    for step in steps:
        report = engine.train_step(window(step, engine.accumulation))
        assert report.loss is not None
        seen.append(Seen(report.loss, report.lr["all"], tuple(engine.counts), tensors(engine)))
    return seen


def off(found: Seen, expected: Seen) -> dict[str, float]:
    """How far the loss, the weights and each state are off, relative to their own norms over all parameters."""
    assert found.tensors.keys() == expected.tensors.keys()
    squares: dict[str, list[float]] = {}
    for name, right in expected.tensors.items():
        apart, size = squares.setdefault(name.split()[0], [0.0, 0.0])
        difference = found.tensors[name].double() - right.double()
        more = difference.square().sum().item(), right.double().square().sum().item()
        squares[name.split()[0]] = [apart + more[0], size + more[1]]
    norms = {name: math.sqrt(apart / size) for name, (apart, size) in squares.items()}
    return {"loss": abs(found.loss - expected.loss) / abs(expected.loss), **norms}


@pytest.mark.parametrize("kind", KINDS)
def test_each_resume_goes_on_as_if_nothing_had_happened_cases_73_76_87(ranks, tmp_path: Path, kind: str) -> None:
    """(1, 17), empty, 0-dim, tied, frozen and unused parameters; the warm-up goes on."""
    expected = ranks.run(uninterrupted, kind, world=1)[0]
    tolerance = KINDS[kind][1]
    before: dict[str, Tensor] = {}
    for place, (layout, world, _) in enumerate(CHAIN):
        found = ranks.run(go_on, kind, place, str(tmp_path), world=world)
        for loaded, _ in found if place else ():
            changed = [name for name, tensor in before.items() if not torch.equal(loaded[name], tensor)]
            assert not changed, f"{layout} on {world} ranks has not what was saved"
        _, seen = found[0]
        for update, after in enumerate(seen):
            right = expected[place * EACH + update]
            assert (after.lr, after.counts) == (right.lr, right.counts)
            worst = {name: by for name, by in off(after, right).items() if not by < tolerance}
            assert not worst, f"update {update + 1} after the resume under {layout} on {world} ranks: {worst}"
        before = seen[-1].tensors


MANIFEST = """
[run]
name = "chain"
steps = {steps}
out = "{out}"
[batch]
global = 12
[model]
factory = "run_targets:model"
[data]
source = "run_targets:logged"
length = 50
[optimize]
use = ["adamw", "warmup_linear"]
[optimize.adamw]
lr = 0.02
[optimize.warmup_linear]
warmup = 6
total = 12
[checkpoint]
every = 3
"""


def test_a_run_goes_on_at_another_stage_and_world_size(ranks, tmp_path: Path) -> None:
    """By its manifest and --set alone."""
    links = [("zero2", 2, 3), ("zero3", 3, 6), (None, 1, 9), ("zero1", 4, 12)]
    for name in ("whole", "parts"):
        (tmp_path / f"{name}.toml").write_text(MANIFEST.format(steps=12, out=tmp_path / name))
    ranks.run(run, str(tmp_path / "whole.toml"), world=1)
    for place, (stage, world, steps) in enumerate(links):
        sets = [f"run.steps={steps}", *([f'partition.use=["{stage}"]'] if stage else [])]
        resume = "latest" if place else None
        summary = ranks.run(run, str(tmp_path / "parts.toml"), sets, False, resume, world=world)[0]
        assert summary.updates == steps
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert distance(found, expected) < 1e-12
