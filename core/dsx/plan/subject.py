"""What is planned: a model and a micro-batch without memory, made anew for every rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dsx.batch import forward
from dsx.deferred.on_meta import META, OnMeta
from dsx.errors import DsxError
from dsx.manifest import Manifest
from dsx.run.data import collate
from dsx.run.samples import samples_of
from dsx.run.targets import make

Forward = Callable[[Any], Any]
"""Calls what it is given (an engine, or the model) on a micro-batch."""


@frozen
class Subject:
    """A model to plan for.

    model    makes it on the meta device
    forward  None where no data is known: then states are planned, and no activations
    notes    for people: what is not known, and therefore not in the plan
    """

    model: Callable[[], nn.Module]
    forward: Forward | None
    notes: Sequence[str] = field(default=())


def of_manifest(settings: Manifest, micro: int | None) -> Subject:
    """The manifest's own model, and `micro` samples of its data. Raises `DsxError` where it names no model."""
    target = settings.model
    if target is None:
        raise DsxError(
            "the manifest names no model",
            where=str(settings.path or "the manifest"),
            remedy="give a number: --parameters 7.5e9; or from the script: dsx.forecast(model, manifest, batch=...)",
        )

    def model() -> nn.Module:
        with OnMeta():  # type: ignore[no-untyped-call]
            found = make(target, "model.factory")
        if not isinstance(found, nn.Module):
            raise DsxError(f"model.factory returned a {type(found).__name__}", expected="a torch.nn.Module")
        return found.to(META)

    if settings.data is None or micro is None:
        what = "[data]" if settings.data is None else "[batch] with micro or global"
        return Subject(model, None, (f"without {what} no micro-batch is known: activations are not in the plan",))
    sample = samples_of(make(settings.data, "data.source"), settings.run.seed).first()
    batch = on_meta(collate([sample] * micro, torch.device("cpu")))
    return Subject(model, lambda engine: forward(engine, batch))


def of_count(parameters: int) -> Subject:
    """A model of so many parameters, of the usual proportions."""
    if parameters < 1:
        raise DsxError(f"a model of {parameters} parameters cannot be planned", expected="1 or more")
    layers = min(parameters, max(1, round((parameters / 1e4) ** (1 / 3))))
    note = f"{parameters:,} parameters in {layers} equal units: activations are not in the plan"
    return Subject(lambda: Stack(_shares(parameters, layers)), None, (note,))


def _shares(whole: int, parts: int) -> list[int]:
    each, left = divmod(whole, parts)
    return [each + (number < left) for number in range(parts)]


class Stack(nn.Module):
    """Units of so many parameters each, on the meta device."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Weights(size) for size in sizes)


class Weights(nn.Module):
    """One parameter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=META))


def use_all(model: nn.Module) -> Forward:
    """Change a model's forward to one that uses every parameter once, in the order of its modules, and holds nothing.

    For a model whose real forward is not known: states, gradients and traffic are those of any forward.
    """
    for module in model.modules():
        module.forward = partial(_use, module)
    return lambda engine: engine(torch.zeros((), device=META))


def _use(module: nn.Module, total: Tensor) -> Tensor:
    for parameter in module.parameters(recurse=False):
        total = total + parameter.sum().float()
    for child in module.children():
        total = child(total)
    return total


def on_meta(batch: Any) -> Any:
    """The same with tensors that have no memory."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(META), batch)
