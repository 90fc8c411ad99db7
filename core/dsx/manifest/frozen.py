"""Values of a manifest that cannot change: tables, lists and what they hold."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from datetime import date, time
from typing import Any, Generic, TypeVar

from dsx.errors import Problem
from dsx.manifest.words import dotted, show

_V = TypeVar("_V", covariant=True)


class Table(Mapping[str, _V], Generic[_V]):
    """A mapping that cannot change, can be hashed, and travels between processes."""

    __slots__ = ("_content",)
    _content: dict[str, _V]

    def __init__(self, content: Mapping[str, _V] | None = None) -> None:
        object.__setattr__(self, "_content", dict(content or {}))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a manifest does not change: {name!r} cannot be set")

    def __reduce__(self) -> tuple[object, ...]:
        return (Table, (self._content,))

    def __getitem__(self, name: str) -> _V:
        return self._content[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content)

    def __len__(self) -> int:
        return len(self._content)

    def __hash__(self) -> int:
        return hash(frozenset(self._content.items()))

    def __repr__(self) -> str:
        return repr(self._content)


def freeze(value: object, key: str, problems: list[Problem]) -> Any:
    """`value` as tables, tuples and scalars; what TOML cannot hold, or dsx refuses everywhere, is added to `problems`.

    Refused: NaN and infinities, whole numbers beyond 64 bits, None, objects, and names that are empty, framed by blanks
    or no text. What is refused stays in its place, so that the items after it keep theirs.
    """
    if isinstance(value, Mapping):
        return Table({str(name): _freeze_item(name, item, key, problems) for name, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(freeze(item, f"{key}[{index}]", problems) for index, item in enumerate(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if wrong := _wrong_scalar(value):
        problems.append(Problem(key, *wrong))
    return value


def _freeze_item(name: object, item: object, key: str, problems: list[Problem]) -> Any:
    here = dotted(key, str(name))
    if not isinstance(name, str):
        problems.append(Problem(here, f"the name {name!r} is not a text", "a text as the name of a key"))
    elif not name:
        problems.append(Problem(here, "this key is empty"))
    elif name != name.strip():
        problems.append(Problem(here, "this key begins or ends with a blank", nearest=name.strip() or None))
    return freeze(item, here, problems)


def _wrong_scalar(value: object) -> tuple[str, str] | None:
    """What is wrong with `value` and what was expected, if something is."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{show(value)} is refused", "a finite number"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "this number is too large", "a whole number of at most 64 bits"
    if value is None:
        return "None is no value of a manifest", "a value; leave the key out for the default"
    if not isinstance(value, (bool, int, float, str, date, time)):
        return f"a {type(value).__name__} is no value of a manifest", "what TOML can hold"
    return None


def thaw(value: Any) -> Any:
    """A plain copy of a frozen value: dicts and lists that the caller may change."""
    if isinstance(value, Mapping):
        return {name: thaw(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [thaw(item) for item in value]
    return value
