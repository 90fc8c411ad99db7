"""Words for types: what a message says was expected."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import attrs

from dsx.manifest.frozen import Table
from dsx.manifest.ranges import Range
from dsx.manifest.words import show

_PLAIN: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    object: "any value",
    Any: "any value",
}


def is_union(kind: Any) -> bool:
    """Whether `kind` is `X | Y`, in either spelling."""
    return get_origin(kind) in (Union, types.UnionType)


def is_sequence(kind: Any) -> bool:
    """Whether `kind` is read from a list: a list, tuple or set, bare or of something."""
    return (get_origin(kind) or kind) in (list, tuple, Sequence, set, frozenset)


def is_mapping(kind: Any) -> bool:
    """Whether `kind` is a dict or mapping, bare or of something."""
    return (get_origin(kind) or kind) in (dict, Mapping, Table)


def is_annotated(kind: Any) -> bool:
    """Whether `kind` is `Annotated[X, ...]`."""
    return get_origin(kind) is Annotated


def is_literal(kind: Any) -> bool:
    """Whether `kind` is `Literal[...]`."""
    return get_origin(kind) is Literal


def describe(kind: Any) -> str:
    """What a value of the type `kind` is, in words: "a whole number above 0"."""
    arguments = get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if is_annotated(kind):
        return " ".join([describe(arguments[0]), *(mark.words for mark in arguments[1:] if isinstance(mark, Range))])
    if is_literal(kind):
        return " or ".join(map(show, arguments))
    if is_union(kind):
        return " or ".join(describe(member) for member in arguments if member is not types.NoneType)
    if is_sequence(kind):
        return _describe_sequence(arguments)
    if is_mapping(kind) or attrs.has(kind):
        return "a table"
    return getattr(kind, "__name__", str(kind))


def _describe_sequence(items: tuple[Any, ...]) -> str:
    if not items:
        return "a list"
    if len(items) == 1 or items[1] is Ellipsis:
        return f"a list, each item {describe(items[0])}"
    if len(set(items)) == 1:
        return f"a list of {len(items)}, each {describe(items[0])}"
    return f"a list of {len(items)}: {', '.join(map(describe, items))}"
