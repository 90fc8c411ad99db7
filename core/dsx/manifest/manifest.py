"""The manifest of a run, whole: read, checked, and never changed again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from datetime import date, time
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import attrs
from attrs import field, frozen

from dsx.errors import ManifestError, Problem
from dsx.manifest.batch import Batch, resolve
from dsx.manifest.convert import first_of_each_key, structure
from dsx.manifest.frozen import Table, freeze, thaw
from dsx.manifest.read import DEFAULT, Origin, apply_settings, read_file
from dsx.manifest.schema import BatchKeys, Checkpoint, Evaluate, Optimize, Run, Section, Target
from dsx.manifest.sections import PLUGIN_SECTIONS, read_sections
from dsx.manifest.words import dotted, enclosing, key_paths

_T = TypeVar("_T")


@frozen
class _NoOptions:
    """What a plugin without options is given."""


@frozen(kw_only=True)
class Manifest:
    """A run as its manifest describes it; make one with `Manifest.load` or `Manifest.of`.

    path   the file it was read from; None for a dict
    """

    run: Run
    batch: BatchKeys
    model: Target | None
    data: Target | None
    precision: Section
    communicate: Section
    partition: Section
    optimize: Optimize
    attention: Section
    checkpoint: Checkpoint
    evaluate: Evaluate
    observe: Section
    path: Path | None = field(default=None, eq=False)
    _given: Table[Any] = field(repr=False)
    _origins: Table[Origin] = field(repr=False, eq=False)

    @classmethod
    def load(cls, path: str | os.PathLike[str], set: Iterable[str] = ()) -> Manifest:
        """The manifest in the TOML file `path`, with the "key=value" texts of `set` put over it, in order.

        ManifestError with every problem of the file and of `set` at once.
        """
        file = Path(path)
        return cls._build(*read_file(file), set, file)

    @classmethod
    def of(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | Manifest | None,
        set: Iterable[str] = (),
    ) -> Manifest:
        """The manifest that `source` is or names: a path, a dict as TOML would give it, or None for the empty one."""
        settings = tuple(set)
        if isinstance(source, Manifest):
            if not settings:
                return source
            return cls._build(thaw(source._given), dict(source._origins), settings, source.path)
        if isinstance(source, (str, os.PathLike)):
            return cls.load(source, settings)
        if not isinstance(source, (Mapping, NoneType)):
            raise TypeError(f"a manifest is a path, a dict, a Manifest or None, not a {type(source).__name__}")
        content = thaw(source or {})
        return cls._build(content, dict.fromkeys(key_paths(content, ""), Origin("dict")), settings, None)

    @classmethod
    def _build(
        cls, content: dict[str, Any], origins: dict[str, Origin], settings: Iterable[str], path: Path | None
    ) -> Manifest:
        problems = apply_settings(content, origins, settings)
        given: Table[Any] = freeze(content, "", problems)
        sections, found = read_sections(given)
        _raise_any(problems + found, origins)
        return cls(**sections, path=path, given=given, origins=Table(origins))

    def origin(self, key: str) -> Origin:
        """Where the value at the dotted path `key` comes from: a line of the file, --set, a dict, or its default."""
        return self._origins.get(key, DEFAULT)

    def to_dict(self) -> dict[str, Any]:
        """What was given, and nothing else, as plain dicts and lists."""
        plain: dict[str, Any] = thaw(self._given)
        return plain

    def digest(self) -> str:
        """SHA-256, in hexadecimal, of what was given: the same for any order of keys, comments and file name."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), default=_json_of_time)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def section(self, name: str) -> Section:
        """The section `name` that plugins fill: "precision", "partition" and so on."""
        assert name in PLUGIN_SECTIONS, name
        section: Section = getattr(self, name)
        return section

    def sections(self) -> tuple[Section, ...]:
        """Every section that plugins fill, in one fixed order."""
        return tuple(self.section(name) for name in PLUGIN_SECTIONS)

    def resolve_batch(self, world: int) -> Batch:
        """The batch on `world` ranks; ManifestError if the keys of `[batch]` do not fit it."""
        return resolve(self.batch, world, self.origin)

    def options(self, section_name: str, plugin: str, cls: type[_T]) -> _T:
        """The options given to `plugin` as an instance of its attrs class `cls`; ManifestError with all problems."""
        options, problems = self._options(section_name, plugin, cls)
        _raise_any(problems, self._origins)
        assert options is not None
        return options

    def check_options(self, classes: Mapping[tuple[str, str], type[Any] | None]) -> dict[tuple[str, str], Any]:
        """The options of many plugins: (section, plugin) -> class to (section, plugin) -> instance.

        None as the class means that the plugin takes no options, and gives None. ManifestError with the problems of
        all plugins at once.
        """
        instances, problems = {}, []
        for (section, plugin), cls in classes.items():
            options, found = self._options(section, plugin, cls or _NoOptions)
            instances[section, plugin] = options if cls else None
            problems += found
        _raise_any(problems, self._origins)
        return instances

    def _options(self, section: str, plugin: str, cls: type[_T]) -> tuple[_T | None, list[Problem]]:
        return structure(self.section(section).tables.get(plugin, Table()), cls, dotted(section, plugin))


def _raise_any(problems: Iterable[Problem], origins: Mapping[str, Origin]) -> None:
    """Raise the problems, if there are any, each with the place where its key was given, in the order of the file."""
    placed = [_placed(problem, origins) for problem in first_of_each_key(problems)]
    if placed:
        raise ManifestError(sorted(placed, key=lambda problem: problem.line or 0))


def _placed(problem: Problem, origins: Mapping[str, Origin]) -> Problem:
    """A key that was not given stands where its table was."""
    if problem.file is not None:
        return problem
    key = problem.key
    while key and key not in origins:
        key = enclosing(key)
    origin = origins.get(key, DEFAULT)
    file = "--set" if origin.kind == "--set" else origin.file
    return attrs.evolve(problem, file=file, line=origin.line)


def _json_of_time(value: date | time) -> dict[str, str]:
    return {type(value).__name__: value.isoformat()}
