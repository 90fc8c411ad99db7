"""How the manifest speaks of keys and values in its messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_LONGEST = 60


def dotted(parent: str, name: str) -> str:
    """The key path of `name` inside the table at `parent`, quoted as TOML would quote it."""
    step = name if _BARE.fullmatch(name) else quoted(name)
    return f"{parent}.{step}" if parent else step


def quoted(text: str) -> str:
    """`text` between double quotes, with what TOML escapes escaped."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped) + '"'


def show(value: object) -> str:
    """`value` as one would write it in TOML, cut when it is long."""
    text = _toml(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{dotted('', str(k))} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `name` is most likely a misspelling of; None if none is near."""
    by_plain_name = {_plain(candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(_plain(name), by_plain_name, n=1)
    return by_plain_name[found[0]] if found else None


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def key_paths(value: object, key: str) -> Iterator[str]:
    """Every key path at and below `key`: `key` itself, the keys of tables, the places of lists."""
    if key:
        yield key
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from key_paths(item, dotted(key, str(name)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from key_paths(item, f"{key}[{index}]")


def enclosing(key: str) -> str:
    """The key path with its last step cut off; "" above a section.

    A dot inside a quoted name counts as a step too: harmless where the result is only looked up.
    """
    return key[: max(key.rfind("."), key.rfind("["), 0)]
