"""What operations and implementations there are on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import torch

from dsx.errors import KernelUnavailable
from dsx_kernels.choice import FLOATS, Found, Operation, registered

ENGINES = {"aio": "dsx_kernels.aio"}
"""What is no operation, as it works on bytes: modules whose `missing()` says why they cannot run here."""


@cache
def names() -> tuple[str, ...]:
    """Operations by name: the folders beside this file, and what others register."""
    own = (path.parent.name for path in Path(__file__).parent.glob("*/ops.py"))
    return tuple(sorted({*own, *registered()}))


def available(operation: str | None = None) -> tuple[Found, ...]:
    """Every implementation of one operation, or of all: whether it can run here, and for which dtypes it is picked.

    Device types are the CPU and the accelerator, if there is one. The file engine, `aio`, counts as an operation.
    `KernelUnavailable` if there is no such operation.
    """
    known = (*names(), *ENGINES)
    if operation is not None and operation not in known:
        raise KernelUnavailable(f"there is no operation '{operation}'", expected=f"one of {', '.join(known)}")
    wanted = known if operation is None else (operation,)
    return tuple(
        found for name in wanted for found in ([_engine(name)] if name in ENGINES else _found(_operation(name)))
    )


def _engine(name: str) -> Found:
    missing: str | None = import_module(ENGINES[name]).missing()
    return Found(name, "native", ("cpu",), missing, {} if missing else {"cpu": ()})


def _operation(name: str) -> Operation:
    entry = registered().get(name)
    found = entry.load() if entry else import_module(f"dsx_kernels.{name}.ops").OPERATION
    if not isinstance(found, Operation):
        raise KernelUnavailable(f"the operation '{name}' is no dsx_kernels.Operation", found=repr(found))
    return found


def _found(operation: Operation) -> Iterator[Found]:
    operation.candidates()
    picked = {device: {dtype: _picked(operation, device, dtype) for dtype in FLOATS} for device in _devices()}
    for implementation in operation.implementations():
        mine = {
            device: tuple(dtype for dtype, name in chosen.items() if name == implementation.name)
            for device, chosen in picked.items()
        }
        yield Found(
            operation.name,
            implementation.name,
            implementation.devices,
            implementation.missing(),
            {device: dtypes for device, dtypes in mine.items() if dtypes},
        )


def _picked(operation: Operation, device: str, dtype: torch.dtype) -> str | None:
    try:
        return operation.choose(device, dtype).name
    except KernelUnavailable:
        return None


def _devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", *([accelerator.type] if accelerator else [])]
