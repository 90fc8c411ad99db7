"""From the tables of a manifest to its sections, and from names that are not known to those that were meant."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import attrs
from attrs import frozen

from dsx.errors import Problem
from dsx.manifest.convert import structure, unknown_key
from dsx.manifest.frozen import Table
from dsx.manifest.hooks import keys_of
from dsx.manifest.ranges import reference
from dsx.manifest.schema import BatchKeys, Checkpoint, Evaluate, Optimize, Run, Section, Target
from dsx.manifest.words import dotted, nearest, show


@frozen(kw_only=True)
class _Model:
    factory: Annotated[str, reference]


@frozen(kw_only=True)
class _Data:
    source: Annotated[str, reference]


_CLASSES: dict[str, type] = {
    "run": Run,
    "batch": BatchKeys,
    "model": _Model,
    "data": _Data,
    "precision": Section,
    "communicate": Section,
    "partition": Section,
    "optimize": Optimize,
    "attention": Section,
    "checkpoint": Checkpoint,
    "evaluate": Evaluate,
    "observe": Section,
}
PLUGIN_SECTIONS = tuple(name for name, cls in _CLASSES.items() if issubclass(cls, Section))

# What other systems call the keys of this manifest.
_ELSEWHERE = {
    "max_grad_norm": "optimize.clip_norm",
    "gradient_clipping": "optimize.clip_norm",
    "gradient_clip_val": "optimize.clip_norm",
    "train_batch_size": "batch.global",
    "train_micro_batch_size_per_gpu": "batch.micro",
    "per_device_train_batch_size": "batch.micro",
    "gradient_accumulation_steps": "batch.accumulation",
    "zero_optimization": "partition.use",
    "activation_checkpointing": "partition.use",
    "scheduler": "optimize.use",
    "max_steps": "run.steps",
    "output_dir": "run.out",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "evaluate.every",
}


def read_sections(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The sections of a manifest by name, and all that is wrong in them; a section that is wrong is None."""
    problems = [_unknown_section(name, content) for name in content if name not in _CLASSES]
    sections: dict[str, Any] = {}
    for name, cls in _CLASSES.items():
        sections[name], found = _read(name, content.get(name), cls)
        problems += found
    return sections, problems


def _read(name: str, table: object, cls: type) -> tuple[object, list[Problem]]:
    is_target = cls in (_Model, _Data)
    if table is None:
        return (None, []) if is_target else _read(name, Table(), cls)
    if not isinstance(table, Mapping):
        return None, [Problem(name, f"{show(table)} will not do", f"a table, [{name}]")]
    if is_target:
        return _read_target(name, table, cls)
    return _read_plugins(name, table, cls) if issubclass(cls, Section) else _read_plain(name, table, cls)


def _read_plain(name: str, table: Mapping[str, Any], cls: type) -> tuple[object, list[Problem]]:
    known = _keys(cls)
    problems = [_unknown(name, key, known) for key in table if key not in known]
    section, found = structure({key: table[key] for key in known if key in table}, cls, name)
    return section, problems + found


def _keys(cls: type) -> list[str]:
    """The plain keys of a section."""
    return [key for key in keys_of(cls) if not (issubclass(cls, Section) and key in ("name", "tables"))]


def _read_target(name: str, table: Mapping[str, Any], cls: type[Any]) -> tuple[Target | None, list[Problem]]:
    (key,) = _keys(cls)
    target: Any
    target, problems = structure({key: table[key]} if key in table else {}, cls, name)
    if target is None:
        return None, problems
    arguments: dict[str, Any] = {argument: value for argument, value in table.items() if argument != key}
    return Target(getattr(target, key), Table(arguments)), problems


def _read_plugins(name: str, table: Mapping[str, Any], cls: type[Section]) -> tuple[Section | None, list[Problem]]:
    known, used = _keys(cls), _used(table)
    use_is_readable = isinstance(table.get("use", ()), tuple)
    problems: list[Problem] = []
    tables: dict[str, Any] = {}
    for key, value in table.items():
        if key in known:
            continue
        if not isinstance(value, Mapping):
            problems.append(_not_options(name, key, value, known, used))
        elif key in used or not use_is_readable:
            tables[key] = value
        else:
            problems.append(_not_used(name, key, used))
    fields = {key: table[key] for key in known if key in table}
    section, found = structure({"name": name, **fields}, cls, name)
    return section and attrs.evolve(section, tables=Table(tables)), problems + found


def _used(table: Mapping[str, Any]) -> list[str]:
    use = table.get("use", ())
    return [plugin for plugin in use if isinstance(plugin, str)] if isinstance(use, tuple) else []


def _not_options(section: str, key: str, value: object, known: list[str], used: list[str]) -> Problem:
    if key in used:
        return Problem(dotted(section, key), f"{show(value)} will not do", f"a table with the options of {key!r}")
    return _unknown(section, key, known, used)


def _not_used(section: str, plugin: str, used: list[str]) -> Problem:
    what = f"options of {plugin!r}, which is not in use"
    near = nearest(plugin, used)
    return Problem(dotted(section, plugin), what, f"{plugin!r} in `use` of [{section}]", near)


def _unknown(section: str, key: str, known: list[str], used: Iterable[str] = ()) -> Problem:
    near = nearest(key, [*known, *used]) or _elsewhere(key)
    options = ", or a table with the options of a plugin in use" if section in PLUGIN_SECTIONS else ""
    return unknown_key(dotted(section, key), near, f"one of {', '.join(known)}{options}")


def _elsewhere(key: str) -> str | None:
    places = _places()
    near = nearest(key, places)
    return places[near] if near else None


def _places() -> dict[str, str]:
    """Where a name belongs: names of other systems, keys that one section alone has, and sections."""
    keys = [(key, f"{name}.{key}") for name, cls in _CLASSES.items() for key in _keys(cls)]
    sections_with = Counter(key for key, _ in keys)
    unique = {key: place for key, place in keys if sections_with[key] == 1}
    return {**_ELSEWHERE, **unique, **{name: name for name in _CLASSES}}


def _unknown_section(name: str, content: Mapping[str, Any]) -> Problem:
    """An unknown name at the top: a section misspelt, a key outside its section, or a plugin's options."""
    for section in PLUGIN_SECTIONS:
        table = content.get(section)
        if isinstance(table, Mapping) and name in _used(table):
            return unknown_key(name, f"{section}.{name}", None)
    sections = f"one of the sections {', '.join(_CLASSES)}; a plugin is named in `use` of its section"
    kind = "unknown section" if isinstance(content[name], Mapping) else "unknown key"
    near = _elsewhere(name)
    return Problem(dotted("", name), kind, None if near else sections, near)
