"""dsx: one manifest for each layout, in which publishing may overlap with the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

import dsx
from partition_systems.case import RATE, Batch, Case, Trainer


def layout(model: nn.Module, case: Case, *, name: str | None) -> Trainer:
    """A layout by the name of its plugin; None is core's own, which is replicated."""
    manifest: dict[str, Any] = {
        "run": {"overlap_publish": True},
        "batch": {"accumulation": case.accumulation},
        "optimize": {"use": ["adamw"], "adamw": {"lr": RATE}},
        "partition": {"use": [name] if name else []},
        "precision": {"use": ["bf16"] if case.dtype == "bf16" else []},
    }
    engine = dsx.prepare(model, manifest)

    def step(micros: Sequence[Batch]) -> float:
        total = 0.0
        for words in micros:
            loss = engine(**words)["loss"]
            engine.backward(loss)
            engine.step()
            total += loss.item()
        return total / len(micros)

    return Trainer(step, engine.quiesce)
