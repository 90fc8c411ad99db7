"""What a run will take, for people and scripts: `dsx plan` and `dsx.forecast`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import nn

from dsx.batch import forward
from dsx.deferred.held import held
from dsx.deferred.on_meta import META, OnMeta
from dsx.errors import DsxError
from dsx.manifest import Manifest
from dsx.plan.rehearsal import Rehearsal, rehearse
from dsx.plan.subject import Subject, of_count, of_manifest, on_meta
from dsx.registry import Registry
from dsx.resolve import resolve
from dsx.units import plain


@frozen
class Forecast:
    """What one rank will hold and do, and what is not known of it.

    parameters  of the model, tied ones once
    notes       for people
    """

    rehearsal: Rehearsal
    parameters: int
    notes: Sequence[str]


def forecast(
    model: nn.Module | Callable[[], nn.Module] | int | None,
    manifest: Manifest | Mapping[str, Any] | str | Path | None = None,
    *,
    batch: Any = None,
    world: int = 1,
    local: int | None = None,
    set: Sequence[str] = (),
    plugins: Mapping[str, object] | None = None,
) -> Forecast:
    """Say what a run takes on each of `world` ranks, without running or allocating it.

    model     a model, which is not changed; a function that makes one, which is called on the meta device; a number of
              parameters; None: the manifest's
    manifest  as for `dsx.prepare`
    batch     a micro-batch as the model is called on it; only its sizes count. None: the manifest's data, if it names
              the model too; else activations are not in the forecast
    local     ranks of one host; None: all
    set, plugins  as for `dsx.prepare`

    Raises the `DsxError`s of a run that cannot be.
    """
    settings = Manifest.of(manifest, set=set)
    resolved = resolve(settings, Registry.scan(plugins))
    subject = subject_of(model, settings, batch, world)
    found = rehearse(resolved, subject, world=world, local=local)
    notes = list(subject.notes)
    if found.guessed:
        notes.append(f"{found.guessed} numbers that depend on values were taken to be 1")
    return Forecast(found, count(subject), notes)


def subject_of(
    model: nn.Module | Callable[[], nn.Module] | int | None, settings: Manifest, batch: Any, world: int
) -> Subject:
    """What is planned for."""
    if isinstance(model, int):
        return of_count(model)
    if model is None:
        subject = of_manifest(settings, settings.resolve_batch(world).micro)
    elif isinstance(model, nn.Module):
        original = plain(model)
        subject = Subject(lambda: without_memory(original), None)
    else:
        subject = Subject(lambda: _made(model), None)
    if batch is None:
        unknown = ("no micro-batch is known: activations are not in the plan",)
        return subject if subject.forward or subject.notes else evolve(subject, notes=unknown)
    sizes = on_meta(batch)
    return evolve(subject, forward=lambda engine: forward(engine, sizes), notes=())


def count(subject: Subject) -> int:
    """Parameters of the model, tied ones once."""
    return sum(parameter.numel() for parameter in subject.model().parameters())


def without_memory(model: nn.Module) -> nn.Module:
    """A copy of a model on the meta device; the model may be one that was built within `dsx.empty_init`."""
    copies: dict[int, Any] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for _, tensor in held(model):
            empty = torch.empty_like(tensor, device=META)
            is_parameter = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
        return copy.deepcopy(model, copies)


def _made(function: Callable[[], nn.Module]) -> nn.Module:
    with OnMeta():  # type: ignore[no-untyped-call]
        model = function()
    if not isinstance(model, nn.Module):
        raise DsxError(f"the function made a {type(model).__name__}", expected="a torch.nn.Module")
    return model
