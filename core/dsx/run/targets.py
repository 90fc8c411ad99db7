"""What a manifest names by "module:callable": models and data sources."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsx.deferred.recording import empty_init
from dsx.errors import DsxError
from dsx.manifest.schema import Target


def make_model(target: Target, device: torch.device, empty: bool = False) -> nn.Module:
    """The manifest's model, on `device`; with `empty` without memory, within `dsx.empty_init`."""
    model = _without_memory(target) if empty else make(target, "model.factory")
    if not isinstance(model, nn.Module):
        raise DsxError(f"model.factory returned a {type(model).__name__}", expected="a torch.nn.Module")
    return model if empty else model.to(device)


def _without_memory(target: Target) -> Any:
    try:
        with empty_init():
            return make(target, "model.factory")
    except (NotImplementedError, RuntimeError) as error:
        raise DsxError(
            f"model.factory = '{target.path}' failed without memory",
            where="[run] empty_init = true",
            found="; ".join([str(error).partition("\n")[0], *getattr(error, "__notes__", ())]),
            remedy="if it does not fail otherwise, build the model for real: empty_init = false in [run]",
        ) from error


def make(target: Target, key: str) -> Any:
    """Call a "module:callable" with its arguments. The current folder is searched first, as a script's own is."""
    module, _, name = target.path.partition(":")
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module)
        for attribute in name.split("."):
            found = getattr(found, attribute)
    except (ImportError, AttributeError) as error:
        raise DsxError(f"{key} = '{target.path}' cannot be found", found=str(error)) from error
    _check_arguments(found, target, key)
    return found(**target.keywords())


def _check_arguments(found: Any, target: Target, key: str) -> None:
    try:
        signature = inspect.signature(found)
    except ValueError:
        return  # a callable without a signature, such as some built in C
    try:
        signature.bind(**target.keywords())
    except TypeError as error:
        known = ", ".join(signature.parameters)
        raise DsxError(f"{target.path}: {error}", where=f"[{key.split('.')[0]}]", expected=f"among {known}") from error
