"""Connects the model to the layout: hooks on parameters and around units, and what wraps a unit's forward.

Outside in: boundary hooks, compile, activations, the user's forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from dsx.contracts import Activations, Flat, Layout, Unit


def install(layout: Layout, activations: Sequence[Activations], compile_units: bool) -> None:
    """Hook the gradients of every trainable parameter, and the boundaries that the layout asks for."""
    for unit in layout.units:
        for flat in unit.flats:
            if flat.trainable:
                _hook_gradients(layout, flat)
    for unit in layout.units:
        if unit.index or len(layout.units) == 1:
            _wrap_forward(unit, activations, compile_units)
        if layout.boundaries:
            _hook_boundaries(layout, unit)


def _hook_gradients(layout: Layout, flat: Flat) -> None:
    # Autograd holds its hooks where the garbage collector does not look: a hook that held the layout, which holds the
    # parameters, would keep both, and the transport's threads, for ever.
    weak = weakref.ref(layout)
    for number, parameter in enumerate(flat.parameters):
        hook = partial(_arrived, weak, flat.key, number)
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _arrived(weak: weakref.ref[Layout], key: str, number: int, parameter: nn.Parameter) -> None:
    layout = weak()
    if layout is not None:
        layout.gradient(key, number, parameter)


def _wrap_forward(unit: Unit, activations: Sequence[Activations], compile_units: bool) -> None:
    forward: Callable[..., Any] = unit.module.forward
    for part in reversed(activations):
        forward = part.wrap(unit, forward)
    if compile_units:
        forward = torch.compile(forward)
    if forward is not unit.module.forward:
        unit.module.forward = forward


def _hook_boundaries(layout: Layout, unit: Unit) -> None:
    wanted = layout.boundaries

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if "enter" in wanted:
            layout.enter(unit)
        inputs = [tensor for tensor in tensors((args, kwargs)) if tensor.requires_grad]
        if "exit" in wanted and inputs and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(inputs, lambda gradients: layout.exit(unit), mode="all")

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        outputs = [tensor for tensor in tensors(output) if tensor.requires_grad]
        if "back" in wanted and outputs and torch.is_grad_enabled():
            torch.autograd.graph.register_multi_grad_hook(outputs, lambda gradient: layout.back(unit), mode="any")
        if "leave" in wanted:
            layout.leave(unit)

    unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    unit.module.register_forward_hook(after, with_kwargs=True)


def tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers, mappings and (data)classes' fields; anything else is left alone."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    else:
        for name in _fields(type(value)):
            yield from tensors(getattr(value, name, None))


def _fields(kind: type) -> Sequence[str]:
    """Names of the fields of a dataclass or attrs class, slotted ones too; none for any other."""
    if attrs.has(kind):
        return [field.name for field in attrs.fields(kind)]
    return list(getattr(kind, "__dataclass_fields__", ()))
