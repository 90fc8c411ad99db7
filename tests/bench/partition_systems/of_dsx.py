"""dsx: one manifest for each layout, in which publishing may overlap with the next forward."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

import dsx
from partition_systems.case import RATE, Case, Trainer, disk, engine_step


def layout(model: nn.Module, case: Case, *, name: str | None, offload: str | None = None) -> Trainer:
    """A layout by the name of its plugin; None is core's own, which is replicated.

    offload  "cpu" or "nvme": where the optimizer's states rest
    """
    manifest: dict[str, Any] = {
        "run": {"overlap_publish": True},
        "batch": {"accumulation": case.accumulation},
        "optimize": {"use": ["adamw"], "adamw": {"lr": RATE}},
        "partition": {"use": [name] if name else []},
        "precision": {"use": ["bf16"] if case.dtype == "bf16" else []},
    }
    if offload:
        manifest["partition"]["use"].append(f"{offload}_offload")
        if offload == "nvme":
            manifest["partition"]["nvme_offload"] = {"path": disk()}
    engine = dsx.prepare(model, manifest)
    return Trainer(partial(engine_step, engine), engine.quiesce)
