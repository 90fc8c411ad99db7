"""The converter: what each type takes from a table, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin

import attrs
from cattrs import BaseValidationError, Converter, IterableValidationError, IterableValidationNote
from cattrs.gen import make_dict_structure_fn, override

from dsx.manifest.describe import is_annotated, is_literal, is_mapping, is_sequence, is_union
from dsx.manifest.frozen import Table, thaw
from dsx.manifest.ranges import Range
from dsx.manifest.words import nearest, show

_Hook = Callable[[Any, Any], Any]


def keys_of(cls: type) -> dict[str, str]:
    """The keys of a table that is read as the attrs class `cls`: key -> field name."""
    return {key_of(field.name): field.name for field in attrs.fields(cls) if field.init}


def key_of(field_name: str) -> str:
    return field_name.removesuffix("_")


class Refused(ValueError):
    """A value of the wrong type or out of its range; what was expected is known where the field is."""

    def __init__(self, value: object, near: str | None = None) -> None:
        super().__init__(value)
        self.value, self.near = value, near

    def __str__(self) -> str:
        shown = show(self.value)
        return f"{shown} will not do: a value is needed here" if shown == '"auto"' else f"{shown} will not do"


@functools.cache
def converter() -> Converter:
    """The converter of every table: strict about types, and silent about nothing."""
    made = Converter(forbid_extra_keys=True, detailed_validation=True)
    for kind, hook in _SCALARS.items():
        made.register_structure_hook(kind, hook)
    made.register_structure_hook_func(lambda kind: kind in (object, Any), _any)
    made.register_structure_hook_factory(is_union, _union)
    made.register_structure_hook_factory(is_sequence, _sequence)
    made.register_structure_hook_factory(is_mapping, _mapping)
    made.register_structure_hook_factory(is_literal, _literal)
    made.register_structure_hook_factory(is_annotated, _annotated)
    made.register_structure_hook_factory(attrs.has, _class)
    return made


def _int(value: object, _: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise Refused(value)


def _float(value: object, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Refused(value)
    try:
        return float(value)
    except OverflowError:
        raise Refused(value) from None


def _bool(value: object, _: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise Refused(value)


def _str(value: object, _: Any) -> str:
    if isinstance(value, str):
        return value
    raise Refused(value)


def _path(value: object, _: Any) -> Path:
    if isinstance(value, str) and value:
        return Path(value)
    raise Refused(value)


def _any(value: object, _: Any) -> object:
    return value


_SCALARS: dict[Any, _Hook] = {int: _int, float: _float, bool: _bool, str: _str, Path: _path}


def _annotated(kind: Any, converter: Converter) -> _Hook:
    base, *marks = get_args(kind)
    ranges = [mark for mark in marks if isinstance(mark, Range)]

    def hook(value: object, _: Any) -> object:
        result = converter.structure(value, base)
        for allowed in ranges:
            if result is not None and not allowed.test(result):
                raise Refused(value, nearest(value, allowed.names) if isinstance(value, str) else None)
        return result

    return hook


def _literal(kind: Any, _: Converter) -> _Hook:
    # True == 1 in Python: the type is part of the value.
    allowed = {(type(value), value): value for value in get_args(kind)}
    names = [value for value in get_args(kind) if isinstance(value, str)]

    def hook(value: object, _: Any) -> object:
        if isinstance(value, (str, int)) and (type(value), value) in allowed:
            return value
        raise Refused(value, nearest(value, names) if isinstance(value, str) else None)

    return hook


def _union(kind: Any, converter: Converter) -> _Hook:
    members = [member for member in get_args(kind) if member is not NoneType]

    def hook(value: object, _: Any) -> object:
        if value is None and len(members) < len(get_args(kind)):
            return None
        failures: list[Exception] = []
        for member in members:
            try:
                return converter.structure(value, member)
            except (BaseValidationError, Refused) as error:
                failures.append(error)
        raise failures[0] if len(failures) == 1 else Refused(value)

    return hook


def _sequence(kind: Any, converter: Converter) -> _Hook:
    origin, kinds = get_origin(kind) or kind, get_args(kind)
    build = tuple if origin is Sequence else origin
    fixed = origin is tuple and len(kinds) > 0 and kinds[-1] is not Ellipsis

    def hook(value: object, _: Any) -> object:
        if not isinstance(value, (list, tuple)) or (fixed and len(value) != len(kinds)):
            raise Refused(value)
        wanted = kinds if fixed else [kinds[0] if kinds else object] * len(value)
        return build(_each(enumerate(value), wanted, kind, converter))

    return hook


def _mapping(kind: Any, converter: Converter) -> _Hook:
    item = (*get_args(kind), object, object)[1]
    mutable = (get_origin(kind) or kind) is dict

    def hook(value: object, _: Any) -> object:
        if not isinstance(value, Mapping):
            raise Refused(value)
        items = zip(value, _each(value.items(), [item] * len(value), kind, converter), strict=True)
        return {name: thaw(entry) for name, entry in items} if mutable else Table(dict(items))

    return hook


def _each(items: Iterable[tuple[Any, object]], kinds: Iterable[Any], whole: Any, converter: Converter) -> list[object]:
    """Every item as its type; all that fail come in one group that knows their places."""
    results, failures = [], []
    for (index, value), kind in zip(items, kinds, strict=True):
        try:
            results.append(converter.structure(value, kind))
        except Exception as error:
            error.add_note(IterableValidationNote(f"item {index!r}", index, kind))
            failures.append(error)
    if failures:
        raise IterableValidationError("items", failures, whole)
    return results


def _class(cls: Any, converter: Converter) -> _Hook:
    renamed: dict[str, Any] = {field: override(rename=key) for key, field in keys_of(cls).items() if key != field}
    read: _Hook = make_dict_structure_fn(cls, converter, **renamed)

    def hook(value: object, _: Any) -> object:
        if not isinstance(value, Mapping):
            raise Refused(value)
        return read(value, cls)

    return hook
