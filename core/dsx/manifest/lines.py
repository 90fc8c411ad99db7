"""On which line of a TOML text each key stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli

from dsx.manifest.words import dotted

_CLOSING = ("]", "}", '"""', "'''")


def key_lines(text: str) -> dict[str, int]:
    """The 1-based line of every key and table header of `text`, which tomli has accepted: key path -> line.

    No second parser: a statement is the fewest lines, from the one it begins on, that tomli accepts alone.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    found: dict[str, int] = {}
    tables: dict[str, int] = {}
    prefix, at = "", 0
    while at < len(lines):
        start = lines[at].strip(" \t")
        if start.startswith("["):
            prefix = _enter(tomli.loads(lines[at]), found, tables, at + 1)
            at += 1
        elif not start or start.startswith("#"):
            at += 1
        else:
            statement, length = _statement(lines, at)
            _record(statement, prefix, found, at + 1)
            at += length
    return found


def _statement(lines: list[str], at: int) -> tuple[dict[str, Any], int]:
    for end in range(at + 1, len(lines) + 1):
        # Only these end what spans lines: without this test, a long array would be read once for each of its lines.
        if end == at + 1 or any(closing in lines[end - 1] for closing in _CLOSING):
            try:
                return tomli.loads("\n".join(lines[at:end])), end - at
            except tomli.TOMLDecodeError:
                continue
    raise AssertionError("a text that tomli accepts consists of statements that it accepts")


def _enter(header: Any, found: dict[str, int], tables: dict[str, int], line: int) -> str:
    """The path of the table that a header opens; `tables` counts what each array of tables holds so far."""
    prefix = ""
    while isinstance(header, Mapping) and header:
        ((name, header),) = header.items()
        prefix = dotted(prefix, name)
        found.setdefault(prefix, line)
        if isinstance(header, list):
            tables[prefix] = tables.get(prefix, 0) + 1
            header = header[0]
        if prefix in tables:
            prefix = f"{prefix}[{tables[prefix] - 1}]"
            found.setdefault(prefix, line)
    return prefix


def _record(value: object, key: str, found: dict[str, int], line: int) -> None:
    if isinstance(value, Mapping):
        for name, item in value.items():
            below = dotted(key, name)
            found.setdefault(below, line)
            _record(item, below, found, line)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _record(item, f"{key}[{index}]", found, line)
