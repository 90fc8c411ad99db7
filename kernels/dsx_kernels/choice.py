"""An operation, its implementations, and which of them runs for a device type and dtype."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Any

import torch

from dsx.errors import DsxError, KernelUnavailable, near

GROUP = "dsx.kernels"
VARIABLE = "DSX_KERNELS"
REFERENCE = "reference"

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What elementwise operations accept."""

_log = logging.getLogger("dsx.kernels")


def _never() -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to run an operation.

    name      reference, native, triton, cuda, torch, or a third party's own
    function  "module:name" of a function with the operation's signature, imported when it is picked
    devices   device types it runs on; empty: all
    dtypes    of the tensor by which the operation picks
    missing   says why it cannot run on this machine; None if it can
    """

    name: str
    function: str
    devices: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = FLOATS
    missing: Callable[[], str | None] = _never

    def why_not(self, device: str, dtype: torch.dtype) -> str | None:
        """Why it does not serve a device type and dtype here; None if it does."""
        if self.devices and device not in self.devices:
            return f"is for {', '.join(self.devices)}"
        if dtype not in self.dtypes:
            return f"is for {', '.join(map(_name, self.dtypes))}"
        return self.missing()

    def load(self) -> Callable[..., Any]:
        """The function."""
        module, _, name = self.function.partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function


@dataclass(frozen=True)
class Found:
    """An implementation of an operation, as it is on this machine.

    missing  why it cannot run here; None if it can
    picked   by device type of this machine: the dtypes for which it is the one that runs; none named: any
    """

    operation: str
    name: str
    devices: tuple[str, ...]
    missing: str | None
    picked: Mapping[str, tuple[torch.dtype, ...]]


class Operation:
    """An operation by name, with its implementations, the best first.

    Those that others register in the entry-point group `dsx.kernels` as "operation.implementation" come before the
    reference and after the rest: being installed takes nothing over. The environment variable
    DSX_KERNELS=operation=implementation,... names one; then no other is taken.
    """

    def __init__(self, name: str, *implementations: Implementation) -> None:
        self.name, self._own = name, implementations
        self._picked: dict[tuple[str, torch.dtype], Callable[..., Any]] = {}

    def pick(self, device: torch.device, dtype: torch.dtype) -> Callable[..., Any]:
        """The function that runs for a device type and dtype, the same until the process ends.

        `KernelUnavailable` if there is none, or DSX_KERNELS names one that is not there.
        """
        picked = self._picked.get((device.type, dtype))
        if picked is None:
            implementation = self.choose(device.type, dtype)
            picked = self._picked[device.type, dtype] = implementation.load()
            _log.info("%s on %s, %s: %s", self.name, device.type, _name(dtype), implementation.name)
        return picked

    def choose(self, device: str, dtype: torch.dtype) -> Implementation:
        """The implementation that `pick` takes; nothing is loaded or remembered."""
        wanted = self.wanted()
        reasons = []
        for implementation in self.candidates():
            why = implementation.why_not(device, dtype)
            if why is None:
                return implementation
            reasons.append(f"{implementation.name} {why}")
        raise KernelUnavailable(
            f"{self.name} has no implementation for {_name(dtype)} on {device}"
            if wanted is None
            else f"{self.name} cannot run by '{wanted}' for {_name(dtype)} on {device}",
            where=f"environment variable {VARIABLE}" if wanted else None,
            found="; ".join(reasons),
            remedy=f"remove {self.name}={wanted} from it" if wanted else None,
        )

    def implementations(self) -> tuple[Implementation, ...]:
        """Own ones and those of others, in the order in which they are tried."""
        others = (_other(entry) for entry in _entries() if entry.name.startswith(f"{self.name}."))
        first = [own for own in self._own if own.name != REFERENCE]
        last = [own for own in self._own if own.name == REFERENCE]
        return (*first, *others, *last)

    def wanted(self) -> str | None:
        """The implementation that DSX_KERNELS names."""
        return _wanted(os.environ.get(VARIABLE, "")).get(self.name)

    def candidates(self) -> Iterable[Implementation]:
        """Those that `choose` tries. `KernelUnavailable` if DSX_KERNELS names what is not known."""
        known, wanted = self.implementations(), self.wanted()
        if wanted is None:
            return known
        chosen = [implementation for implementation in known if implementation.name == wanted]
        if not chosen:
            names = [implementation.name for implementation in known]
            raise KernelUnavailable(
                f"{self.name} has no implementation '{wanted}'",
                where=f"environment variable {VARIABLE}",
                expected=f"one of {', '.join(names)}",
                remedy=near(wanted, names),
            )
        return chosen


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _wanted(text: str) -> Mapping[str, str]:
    """What DSX_KERNELS says: implementation by operation."""
    from dsx_kernels.found import names

    wanted = {}
    for pair in filter(None, (part.strip() for part in text.split(","))):
        operation, equals, implementation = (part.strip() for part in pair.partition("="))
        if not equals or not implementation:
            raise KernelUnavailable(
                f"'{pair}' names no implementation of an operation",
                where=f"environment variable {VARIABLE}",
                expected="operation=implementation, several with commas between them",
            )
        if operation not in names():
            raise KernelUnavailable(
                f"there is no operation '{operation}'",
                where=f"environment variable {VARIABLE}",
                expected=f"one of {', '.join(names())}",
                remedy=near(operation, names()),
            )
        wanted[operation] = implementation
    return wanted


@cache
def _entries() -> tuple[metadata.EntryPoint, ...]:
    """What others register; by the standard library, since it survives a broken file of some other package."""
    return tuple(sorted(metadata.entry_points(group=GROUP), key=lambda entry: entry.name))


def registered() -> dict[str, metadata.EntryPoint]:
    """Whole operations that others register, by name."""
    return {entry.name: entry for entry in _entries() if "." not in entry.name}


def _other(entry: metadata.EntryPoint) -> Implementation:
    """The implementation of an entry "operation.implementation"; one that does not load says why."""
    name = entry.name.partition(".")[2]
    try:
        found = entry.load()
        if not isinstance(found, Implementation):
            raise DsxError(f"{entry.value} is no dsx_kernels.Implementation")
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]
        return Implementation(name, entry.value, missing=lambda: f"does not load from {entry.value}: {first}")
    return Implementation(name, found.function, found.devices, found.dtypes, found.missing)
