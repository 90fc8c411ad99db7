"""dsx: one manifest for each layout, in which publishing may overlap with the next forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

import dsx
from partition_systems.case import RATE, Batch, Case, Trainer, disk, engine_step


def layout(
    model: nn.Module,
    case: Case,
    *,
    name: str | None,
    rule: str = "adamw",
    overlapped: bool = True,
    numbers: Mapping[str, int] | None = None,
    offload: str | None = None,
    early: bool = False,
) -> Trainer:
    """A layout by the name of its plugin; None is core's own, which is replicated.

    rule        plugin of the optimizer
    overlapped  whether gradients are reduced during backward, or after it
    numbers     options of the rule; those of 1 bit are frozen after their first update, so that all is compressed
    offload     "cpu" or "nvme": where the optimizer's states rest
    early       whether their update begins during backward, with units cut to 3 MB for it
    """
    manifest: dict[str, Any] = {
        "run": {"overlap_publish": True},
        "batch": {"accumulation": case.accumulation},
        "optimize": {"use": [rule], rule: {"lr": RATE, **(numbers or {})}},
        "partition": {"use": [name] if name else []},
        "precision": {"use": ["bf16"] if case.dtype == "bf16" else []},
    }
    if offload:
        manifest["partition"]["use"].append(f"{offload}_offload")
        if offload == "nvme":
            manifest["partition"]["nvme_offload"] = {"path": disk()}
    if early:
        manifest["optimize"]["use"].append("early_update")
        manifest["partition"][name] = {"limit_bytes": 3_000_000}
    engine = dsx.prepare(model, manifest)
    step = partial(engine_step, engine)
    return Trainer(step if overlapped else partial(_after_backward, engine, step), engine.quiesce)


def _after_backward(engine: dsx.Engine, step: Callable[[Sequence[Batch]], float], micros: Sequence[Batch]) -> float:
    with engine.accumulate(sync=False):
        return step(micros)
