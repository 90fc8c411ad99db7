"""A manifest's file and its `--set` values, as plain tables whose keys know where they came from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import tomli
from attrs import frozen

from dsx.errors import ManifestError, Problem
from dsx.manifest.lines import key_lines
from dsx.manifest.words import dotted, enclosing, key_paths, show


@frozen
class Origin:
    """Where a value comes from; `str()` of it reads as "run.toml:12", "--set", "a dict" or "the default".

    file    the manifest's file, for the kind "file"
    line    1-based line in `file`
    """

    kind: Literal["file", "--set", "default", "dict"]
    file: Path | None = None
    line: int | None = None

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.file}:{self.line}" if self.line else str(self.file)
        return {"--set": "--set", "dict": "a dict", "default": "the default"}[self.kind]


SET = Origin("--set")
DEFAULT = Origin("default")


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Origin]]:
    """The tables of a TOML file and the origin of every key path in it; ManifestError if it cannot be read."""
    text = _text(path)
    try:
        content = tomli.loads(text)
    except (ValueError, RecursionError) as error:
        raise _not_toml(error, path, text) from None
    lines = key_lines(text)
    return content, {key: Origin("file", path, _line(key, lines)) for key in key_paths(content, "")}


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return data.decode("utf-8-sig")
    except FileNotFoundError:
        problem = Problem("manifest", "there is no such file", file=path)
    except IsADirectoryError:
        problem = Problem("manifest", "this is a folder", "a TOML file", file=path)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = Problem("manifest", "this is not a text in UTF-8", "a TOML file", file=path, line=line)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = Problem("manifest", f"the file cannot be read: {reason}", file=path)
    raise ManifestError([problem])


def _not_toml(error: Exception, path: Path, text: str) -> ManifestError:
    if not isinstance(error, tomli.TOMLDecodeError):
        return ManifestError([Problem("manifest", f"this is not valid TOML: {error}", file=path)])
    lines = text.replace("\r\n", "\n").split("\n")
    what = f"this is not valid TOML: {error.msg} (column {error.colno} of `{lines[error.lineno - 1].strip()}`)"
    return ManifestError([Problem("manifest", what, file=path, line=error.lineno)])


def _line(key: str, lines: dict[str, int]) -> int | None:
    while key and key not in lines:
        key = enclosing(key)
    return lines.get(key)


def apply_settings(content: dict[str, Any], origins: dict[str, Origin], settings: Iterable[str]) -> list[Problem]:
    """Put each "key=value" into `content` and `origins`, the later over the earlier; returns what is wrong with them.

    The value is read as TOML, else it is a plain string. Tables on the way are made.
    """
    problems = []
    for setting in settings:
        key, value = _split(setting)
        wrong = _put(content, origins, key, value) if key else "no key before a '='"
        if wrong:
            problems.append(Problem(setting, wrong, 'something like "optimize.clip_norm=1.0"', file="--set"))
    return problems


def _split(setting: str) -> tuple[list[str], Any]:
    """The steps of the key and the value; no steps if there is no valid key. A quoted name may hold a '='."""
    at = setting.find("=")
    while at >= 0:
        if steps := _steps(setting[:at]):
            return steps, _value(setting[at + 1 :])
        at = setting.find("=", at + 1)
    return [], None


def _steps(key: str) -> list[str]:
    try:
        table: Any = tomli.loads(f"{key} = 0") if "\n" not in key else {}
    except ValueError:
        return []
    steps = []
    while isinstance(table, dict) and table:
        ((name, table),) = table.items()
        steps.append(name)
    return steps


def _value(text: str) -> Any:
    try:
        table = tomli.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return table["value"] if len(table) == 1 else text


def _put(content: dict[str, Any], origins: dict[str, Origin], steps: list[str], value: Any) -> str | None:
    """Set one value; returns why it cannot be, if so."""
    table, key = content, ""
    for step in steps[:-1]:
        key = dotted(key, step)
        if step not in table:
            table[step], origins[key] = {}, SET
        table = table[step]
        if not isinstance(table, dict):
            return f"{key} is {show(table)}, not a table"
    table[steps[-1]] = value
    key = dotted(key, steps[-1])
    for old in [old for old in origins if old.startswith((f"{key}.", f"{key}["))]:
        del origins[old]
    origins.update(dict.fromkeys(key_paths(value, key), SET))
    return None
