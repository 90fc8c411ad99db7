"""`prepare`: the one place that sees both the registry and the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from dsx.build import build
from dsx.deferred.values import home, values_of
from dsx.engine import Engine
from dsx.errors import DsxError
from dsx.launch.distributed import join
from dsx.launch.script import run_manifest
from dsx.manifest import Manifest
from dsx.plugin import Plan
from dsx.registry import Registry
from dsx.resolve import Resolved, resolve
from dsx.shared import refuse_shared
from dsx.units import plain


def prepare(
    model: nn.Module,
    manifest: Manifest | Mapping[str, object] | str | Path | None = None,
    *,
    set: Sequence[str] = (),
    plugins: Mapping[str, object] | None = None,
    device: torch.device | str | None = None,
    weights: str | Path | None = None,
    overlap_publish: bool = False,
) -> Engine:
    """Make an engine that trains `model` as a manifest says.

    model            built alike on every rank, for real or within `dsx.empty_init`; rank 0's weights become everyone's.
                     Its parameters stay the same objects, as views of buffers that the run's layout owns
    manifest         a path, a dict or a `Manifest`; None is that of `dsx run MANIFEST SCRIPT`, with what its command
                     line sets put over `set`, else the empty one: plain data-parallel training with AdamW.
                     [model] and [data] are accepted and not used
    set              "key=value" overrides, as on the command line
    plugins          by name: plugins of your own that no package registers, for the manifest to use
    device           where to train it; None: where it is, or was asked to be within `dsx.empty_init`
    weights          to start from, in place of the model's own: a safetensors file, or a folder with one or with an
                     index of several; by default the manifest's run.weights
    overlap_publish  the default of the manifest's run.overlap_publish

    Takes the default process group if there is one, else makes it from the launcher's environment, else runs alone.
    Raises `DsxError` and its children, all before anything is trained.
    """
    if manifest is None:
        manifest, given = run_manifest()
        set = (*set, *given)
    settings = Manifest.of(manifest, set=set)
    registry = Registry.scan(plugins)
    resolved = resolve(settings, registry)
    chosen_device = None if device is None else torch.empty(0, device=device).device
    values = values_of(plain(model), chosen_device, weights or settings.run.weights)
    refuse_shared(plain(model))
    place = chosen_device or _device(model)
    ranks = join(place)
    plan = make_plan(resolved, ranks.rank, ranks.world, place)
    sizes: Sequence[int] = ()
    if resolved.fillers.get("tiers"):
        from dsx.plan.rooms import footprints  # what only a run needs that puts states elsewhere

        sizes = footprints(resolved, plan, plain(model), registry)
    program = build(resolved, plan, model, values=values, sizes=sizes)
    chosen = settings.run.overlap_publish
    return Engine(
        model,
        program,
        accumulation=plan.accumulation,
        clip_norm=settings.optimize.clip_norm,
        overlap_publish=overlap_publish if chosen is None else chosen,
    )


def make_plan(resolved: Resolved, rank: int, world: int, device: torch.device) -> Plan:
    """What is known before parts are built."""
    settings = resolved.manifest
    return Plan(
        fillers=resolved.names(),
        offers=resolved.offers(),
        needs=resolved.needs(),
        rank=rank,
        world=world,
        accumulation=settings.resolve_batch(world).accumulation,
        steps=settings.run.steps,
        seed=settings.run.seed,
        device=device,
    )


def _device(model: nn.Module) -> torch.device:
    """Where the model's parameters are; refuses models that nothing can be trained of."""
    parameters = dict(plain(model).named_parameters())
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise DsxError("the model has no parameter that requires gradients", remedy="nothing of it can be trained")
    devices: dict[torch.device, str] = {}
    for name, parameter in parameters.items():
        devices.setdefault(home(parameter), name)
    if len(devices) > 1:
        places = ", ".join(f"'{name}' on {device}" for device, name in devices.items())
        raise DsxError("the model's parameters are on several devices", found=places, remedy="move it to one device")
    (device,) = devices
    return device
