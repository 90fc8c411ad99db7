"""A module's forward with one function in it replaced: copies of its code whose globals name the replacement.

Nothing is looked up while the model runs, and nobody else's call of that function changes. The copies see the globals
of their modules as they are at set-up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from dsx.errors import DsxError
from dsx.sites.reach import Use, followed, forward_of, names_in, reaches, uses


class Rebinding:
    """Calls of `target` become calls of `replacement`, in copies that modules of one class share, so that what is
    compiled for one of them serves all."""

    def __init__(self, target: Callable[..., Any], replacement: Callable[..., Any]) -> None:
        self._target, self._replacement = target, replacement
        self._copies: dict[tuple[FunctionType, type], FunctionType] = {}
        self._stand_ins: list[ModuleType] = []

    def place(self, module: nn.Module, name: str) -> Callable[[], None]:
        """Give a module copies of its forward, and of the methods that reach the target; returns what undoes that."""
        forward = forward_of(module)
        here = module.__dict__.get("forward")
        if forward is None or (here is not None and getattr(here, "__func__", None) is not forward):
            raise _refusal(name, "the instance has a forward that is not its class's", "take that off")
        replaced: dict[str, Any] = {"forward": forward}
        self._collect(forward, module, name, replaced)
        before = {key: module.__dict__.get(key) for key in replaced}
        for key, function in replaced.items():
            if function is self._target:
                setattr(module, key, self._replacement)
            else:
                setattr(module, key, MethodType(self._copy(function, module), module))
        return partial(_restore, module, before)

    def _collect(self, function: FunctionType, module: nn.Module, name: str, found: dict[str, Any]) -> None:
        """The attributes of self through which `function` reaches the target. `DsxError` for a way that is closed."""
        known: set[str] = set()
        for use in uses(function, module):
            known.update(use.names if use.value is not None else ())
            if not self._leads(use, module):
                continue
            if use.kind == "super":
                raise _refusal(name, f"its class reaches it through super().{use.names[0]}", "define it in the class")
            if use.kind == "self" and use.names[0] not in found:
                if isinstance(use.value, (staticmethod, classmethod)):
                    raise _refusal(name, f"{use.names[0]} is no plain method", "make it one")
                found[use.names[0]] = use.value
            elif use.kind == "self":
                continue
            inner = followed(use)
            if inner is not None:
                self._collect(inner, module, name, found)
        if self._target.__name__ in names_in(function) - known:
            place = f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"
            raise _refusal(name, f"{place} gets it in a way that is known only when it runs", "import it at the top")

    def _leads(self, use: Use, module: nn.Module) -> bool:
        inner = followed(use)
        return use.value is self._target or (inner is not None and reaches(inner, module, self._target))

    def _copy(self, function: FunctionType, module: nn.Module) -> FunctionType:
        """The function, with globals and free variables of its own where they lead to the target."""
        key = (function, type(module))
        if key in self._copies:
            return self._copies[key]
        leading = [use for use in uses(function, module) if use.kind in ("global", "closure")]
        leading = [use for use in leading if self._leads(use, module)]
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for use in leading:
            if use.kind == "closure":
                cells[use.names[0]] = CellType(cells[use.names[0]].cell_contents)
        # torch.compile looks for the globals of a function in the module that they name, and would find the real ones
        space = {name: value for name, value in function.__globals__.items() if name != "__name__"}
        copy = FunctionType(
            function.__code__, space, function.__name__, function.__defaults__, tuple(cells.values()) or None
        )
        copy.__dict__.update(function.__dict__)
        copy.__kwdefaults__, copy.__module__ = function.__kwdefaults__, function.__module__
        copy.__qualname__, copy.__doc__ = function.__qualname__, function.__doc__
        self._copies[key] = copy
        for use in leading:
            inner = followed(use)
            new = self._replacement if inner is None or use.value is self._target else self._copy(inner, module)
            first, *rest = use.names
            if use.kind == "closure":
                cells[first].cell_contents = self._within(cells[first].cell_contents, rest, new)
            else:
                space[first] = self._within(space[first], rest, new)
        return copy

    def _within(self, value: Any, names: list[str], new: Any) -> Any:
        """`new` itself, or a stand-in of the module `value` in which it is found by these names."""
        if not names:
            return new
        if not any(value is mine for mine in self._stand_ins):
            module, value = value, ModuleType(value.__name__)
            value.__dict__.update(module.__dict__)
            self._stand_ins.append(value)
        setattr(value, names[0], self._within(getattr(value, names[0]), names[1:], new))
        return value


def _refusal(name: str, why: str, remedy: str) -> DsxError:
    return DsxError(
        f"the attention of '{name}' cannot be replaced",
        found=why,
        remedy=f"{remedy}; or let the module call `dsx.attention(self, ...)`; or leave it out of the plugin's modules",
    )


def _restore(module: nn.Module, before: dict[str, Any]) -> None:
    for key, value in before.items():
        if value is None:
            delattr(module, key)
        else:
            setattr(module, key, value)
