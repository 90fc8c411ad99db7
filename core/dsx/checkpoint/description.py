"""What a model tells of itself, for whoever has only its weights later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from dsx.units import plain

_CONFIGS = ("config", "generation_config")


def describe_model(model: nn.Module) -> dict[str, Any]:
    """The same on all ranks, as JSON.

    names  of its weights and persistent buffers, each under its first name, in the order of its state_dict
    tied   {another name: first name}
    class  its name
    and, of models in the manner of Hugging Face, `config` and `generation_config`: what their `to_dict` gives
    """
    model = plain(model)
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **persistent_buffers(model)}
    order = {name: place for place, name in enumerate(model.state_dict(keep_vars=True))}
    first = {id(tensor): name for name, tensor in firsts(tensors).items()}
    tied = {name: first[id(tensor)] for name, tensor in tensors.items() if first[id(tensor)] != name}
    names = sorted(first.values(), key=lambda name: order.get(name, len(order)))
    configs = {name: found for name in _CONFIGS if (found := _config(getattr(model, name, None))) is not None}
    return {"names": names, "tied": tied, "class": type(model).__name__, **configs}


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that belong to the model's state, by every name that they have there."""
    model = plain(model)
    persistent = model.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name in persistent}


def firsts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each tensor once, under the first of its names."""
    names = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    return {name: tensor for name, tensor in tensors.items() if names[id(tensor)] == name}


def _config(config: object) -> Mapping[str, Any] | None:
    """A configuration as JSON, None if it is no such object: a checkpoint must not fail for the sake of it."""
    to_dict = getattr(config, "to_dict", None)
    if not callable(to_dict):
        return None
    try:
        found = json.loads(json.dumps(to_dict(), default=str))
    except Exception:
        return None
    return found if isinstance(found, dict) else None
