"""What a module's forward calls, read from its code: through its own methods and the functions that those call."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from attrs import frozen
from torch import nn

_OPAQUE = frozenset({"torch", *sys.stdlib_module_names})
"""Packages whose functions are not looked into."""

_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_CLOSED = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF"})
_SELF = _CLOSED | {"LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"}
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})

Kind = Literal["global", "closure", "self", "super"]


@frozen
class Use:
    """A chain of names in a function's code, such as torch.nn.functional.relu.

    kind   where the first name is looked up; "self" and "super" are not among the names
    value  what it stands for; None where that is not known before the call
    """

    kind: Kind
    names: tuple[str, ...]
    value: Any


def forward_of(module: nn.Module) -> FunctionType | None:
    """The plain function that is the class's forward; None if there is none."""
    return _plain(inspect.getattr_static(type(module), "forward", None))


def reaches(function: FunctionType, module: nn.Module, target: Callable[..., Any]) -> bool:
    """Whether a method of the module calls `target`, by itself or through functions that can be followed."""
    return _reaches(function, module, target, set())


def _reaches(function: FunctionType, module: nn.Module, target: Callable[..., Any], seen: set[FunctionType]) -> bool:
    if function in seen:
        return False
    seen.add(function)
    for use in uses(function, module):
        inner = followed(use)
        if use.value is target or (inner is not None and _reaches(inner, module, target, seen)):
            return True
    return False


def followed(use: Use) -> FunctionType | None:
    """The function that a use calls, if its code is the model's rather than torch's."""
    function = _plain(use.value)
    if function is None or (function.__module__ or "").partition(".")[0] in _OPAQUE:
        return None
    return function


def uses(function: FunctionType, module: nn.Module) -> Iterator[Use]:
    """Every chain of names in the code of a function that the module's forward calls, or that is it."""
    code = function.__code__
    own = "self" if "self" in (*code.co_varnames[:1], *code.co_freevars) else None
    closure = _contents(function)
    for kind, names in _chains(code, own):
        if kind == "self":
            yield Use(kind, names, _attribute(module, names[0]) if len(names) == 1 else None)
        else:
            yield Use(kind, names, _value(function.__globals__ if kind == "global" else closure, names))
    if isinstance(owner := closure.get("__class__"), type) and owner in type(module).__mro__:
        later = type(module).__mro__[type(module).__mro__.index(owner) + 1 :]
        for name in code.co_names:
            yield Use("super", (name,), next((cls.__dict__[name] for cls in later if name in cls.__dict__), None))


def names_in(function: FunctionType) -> frozenset[str]:
    """Every name of a global or an attribute in a function's code and the functions within it."""
    return frozenset(name for code in _codes(function.__code__) for name in code.co_names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _chains(code: CodeType, own: str | None) -> Iterator[tuple[Kind, tuple[str, ...]]]:
    """(kind, names) in a code object and those nested in it; `own` is the name of self."""
    for part in _codes(code):
        kind: Kind | None = None
        names: list[str] = []
        for step in dis.get_instructions(part):
            if step.opname in _ATTRIBUTE and kind is not None:
                names.append(step.argval)
                continue
            if kind is not None and names:
                yield kind, tuple(names)
            kind, names = _begun(step, own)
        if kind is not None and names:
            yield kind, tuple(names)


def _begun(step: dis.Instruction, own: str | None) -> tuple[Kind | None, list[str]]:
    """The chain that an instruction begins."""
    if own is not None and step.opname in _SELF:
        last = step.argval[-1] if isinstance(step.argval, tuple) else step.argval  # some versions load two at once
        if last == own:
            return "self", []
    if step.opname in _GLOBAL:
        return "global", [step.argval]
    return ("closure", [step.argval]) if step.opname in _CLOSED else (None, [])


def _value(space: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    value = space.get(names[0])
    for name in names[1:]:
        if not isinstance(value, ModuleType):
            return None
        value = getattr(value, name, None)
    return value


def _attribute(module: nn.Module, name: str) -> Any:
    return module.__dict__.get(name) or inspect.getattr_static(type(module), name, None)


def _contents(function: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    return found


def _plain(value: Any) -> FunctionType | None:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    value = getattr(value, "__func__", value)  # a method bound to its instance
    return value if isinstance(value, FunctionType) else None
