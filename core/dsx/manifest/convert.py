"""Tables to attrs classes, with every problem at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from cattrs import AttributeValidationNote, BaseValidationError, ForbiddenExtraKeysError, IterableValidationNote

from dsx.errors import Problem
from dsx.manifest.describe import describe
from dsx.manifest.frozen import freeze
from dsx.manifest.hooks import Refused, converter, key_of, keys_of
from dsx.manifest.words import dotted, nearest

_T = TypeVar("_T")


def structure(value: object, cls: type[_T], key_prefix: str) -> tuple[_T | None, list[Problem]]:
    """The table `value` as an instance of the attrs class `cls`, or None and all that is wrong with it.

    `key_prefix` is the dotted path of the table. A field named after a keyword of Python carries a trailing underscore
    that its key has not (`global_`). A ValueError raised by the class itself becomes a problem of the whole table; any
    other exception of the class is a fault of its author and passes through.
    """
    problems: list[Problem] = []
    table = freeze(value, key_prefix, problems)
    instance = None
    try:
        instance = converter().structure(table, cls)
    except (BaseValidationError, Refused) as error:
        problems.extend(_problems(error, key_prefix, cls))
    return (None if problems else instance), first_of_each_key(problems)


def first_of_each_key(problems: Iterable[Problem]) -> list[Problem]:
    """One problem a key: a value that was refused is not reported as missing as well."""
    kept: dict[str, Problem] = {}
    for problem in problems:
        kept.setdefault(problem.key, problem)
    return list(kept.values())


def _problems(error: BaseException, key: str, kind: Any) -> Iterator[Problem]:
    """The problems in the tree of exceptions that cattrs made; `kind` is the type wanted at `key`."""
    if isinstance(error, BaseValidationError):
        for inner in error.exceptions:
            yield from _problems(inner, *_place(inner, key, kind))
    elif isinstance(error, Refused):
        yield Problem(key, str(error), describe(kind), error.near)
    elif isinstance(error, ForbiddenExtraKeysError):
        known = keys_of(error.cl)
        for name in sorted(error.extra_fields):
            yield unknown_key(dotted(key, name), nearest(name, known), f"one of {', '.join(known)}" if known else None)
    elif isinstance(error, KeyError):
        yield Problem(key, "is missing", describe(kind))
    elif isinstance(error, ValueError):
        yield Problem(key, str(error.args[0]) if error.args else type(error).__name__)
    else:
        raise error


def unknown_key(key: str, near: str | None, known: str | None) -> Problem:
    """The problem of a key that nobody reads; `known` says what the table can hold, when no name is near."""
    return Problem(key, "unknown key", None if near else (known or "no key here"), near)


def _place(error: BaseException, key: str, kind: Any) -> tuple[str, Any]:
    """Where, below `key`, an exception of a group arose, and the type that was wanted there."""
    for note in getattr(error, "__notes__", ()):
        if isinstance(note, AttributeValidationNote):
            return dotted(key, key_of(note.name)), note.type
        if isinstance(note, IterableValidationNote):
            index = note.index
            return (f"{key}[{index}]" if isinstance(index, int) else dotted(key, index)), note.type
    return key, kind
