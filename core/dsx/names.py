"""Names of a model's parameters, as users give them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dsx.errors import DsxError, near
from dsx.units import plain


def first_names(model: nn.Module, names: str | Sequence[str] | nn.Module) -> list[str]:
    """First names of the parameters meant, each once; a tied one may be asked for by any of its names.

    names  one or several, or a module of the model for all of its
    """
    model = plain(model)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    if isinstance(names, nn.Module):
        inside = {id(parameter): name for name, parameter in names.named_parameters()}
        for identity, name in inside.items():
            if identity not in first:
                raise DsxError(f"the parameter '{name}' of the {type(names).__name__} is not the model's")
        return [first[identity] for identity in inside]
    known = dict(model.named_parameters(remove_duplicate=False))
    wanted = [names] if isinstance(names, str) else list(names)
    for name in wanted:
        if name not in known:
            raise DsxError(f"the model has no parameter '{name}'", remedy=near(name, known))
    return list(dict.fromkeys(first[id(known[name])] for name in wanted))


def listed(names: Sequence[str]) -> str:
    """The first three, quoted, and how many there are."""
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown}, ... {len(names)} names"
