"""States in host memory and in files beside one GPU, updated on either: as if they were kept on it."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from device.engine import LAYOUTS, LIMITS, ids_on, manifest, small_gpt, train
from device.part import Checks, Figures
from dsx.testing.plain import distance, largest

STATES = {"zero2": ["optimizer", "grad"], "zero3": ["optimizer", "grad", "param"]}


def checks(device: str, argument: str | None) -> Checks:
    for layout in LAYOUTS:
        for tier in ("cpu_offload", "nvme_offload"):
            for update in ("host", "device"):
                yield f"{layout}, {tier}, update on the {update}", partial(is_the_same, layout, tier, update, device)
        yield f"{layout}, delayed_update", partial(is_as_late, layout, device)


def is_the_same(layout: str, tier: str, update: str, device: str) -> Figures:
    """Losses and weights are those of the run without the tier."""
    with tempfile.TemporaryDirectory(prefix="dsx_device_") as folder:
        options: dict[str, Any] = {
            "states": STATES.get(layout, ["optimizer"]),
            "update": update,
            "piece_bytes": 1 << 16,
        }
        if tier == "nvme_offload":
            options["path"] = str(Path(folder) / "states")
        return _compare(layout, {tier: options}, {"use": ["adamw"]}, {"use": ["adamw"]}, device)


def is_as_late(layout: str, device: str) -> Figures:
    """A delayed update beside the GPU's own work ends where the same one with states on the host does."""
    late = {"use": ["adamw", "delayed_update"], "delayed_update": {"after": 2}}
    return _compare(layout, {"cpu_offload": {}}, late, late, device)


def _compare(layout: str, tiers: dict[str, Any], one: dict[str, Any], other: dict[str, Any], device: str) -> Figures:
    near = manifest(layout, optimize=one, precision={"use": ["bf16"]})
    far = manifest(layout, optimize=other, precision={"use": ["bf16"]})
    layouts = [] if layout == "replicated" else [layout]
    far["partition"] = {"use": [*layouts, *tiers], **{name: options for name, options in tiers.items() if options}}
    found = [train(small_gpt().to(device), ids_on(device), wanted) for wanted in (near, far)]
    apart = largest(found[1][0], found[0][0]), distance(found[1][1], found[0][1])
    limits = LIMITS[torch.float32]
    assert apart[0] < 1e-3, f"losses in bf16 are {apart[0]:.2e} apart"
    assert apart[1] < limits[1], f"weights are {apart[1]:.2e} apart, under {limits[1]:.0e} wanted"
    return {"weights apart": f"{apart[1]:.1e}"}
