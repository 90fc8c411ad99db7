"""Which plugins and commands are installed, found without importing any of them.

Entry-point group `dsx.plugins` holds plugins, `dsx.commands` click commands, `dsx.sites` kinds of attention sites.
Neither torch nor any plugin is imported here.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import re
import traceback
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import entrypoints
from attrs import frozen

from dsx.errors import PluginInvalid, PluginNotFound, SlotConflict

PLUGINS, COMMANDS, SITES = "dsx.plugins", "dsx.commands", "dsx.sites"


@frozen
class Registration:
    """An entry point: a name, what it points at, and the distribution that brings it."""

    name: str
    target: str
    distribution: str

    def __str__(self) -> str:
        return f"{self.name} ({self.target}, from {self.distribution})"


@frozen
class Entries:
    """What is registered in one entry-point group.

    notes  of metadata that could not be read, for `dsx plugins` and `dsx doctor`
    """

    group: str
    registrations: tuple[Registration, ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def scan(cls, group: str = PLUGINS) -> Entries:
        """Read the entry points of every installed distribution; imports nothing."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                found = [_registration(entry, entry.distro) for entry in entrypoints.get_group_all(group)]
                notes = []
            except Exception as error:
                # one broken entry_points.txt of any installed package ends entrypoints' whole scan
                words = " ".join(str(error).split())
                found, notes = [], [f"a distribution's entry points cannot be read: {words}"]
        notes += [str(warning.message) for warning in caught]
        seen = {(entry.name, entry.target) for entry in found}
        for entry in _metadata(group):
            if (entry.name, entry.target) not in seen:
                seen.add((entry.name, entry.target))
                found.append(entry)
        return cls(group, tuple(sorted(found, key=lambda entry: (entry.name, entry.distribution))), tuple(notes))

    def names(self) -> Sequence[str]:
        return sorted({entry.name for entry in self.registrations})

    def find(self, name: str, where: str | None = None) -> Registration:
        """The one registration of `name`.

        Raises `PluginNotFound` with near names, or `SlotConflict` if two distributions register it.
        """
        found = [entry for entry in self.registrations if entry.name == name]
        if len(found) > 1:
            raise SlotConflict(
                f"two installed packages register the plugin '{name}'",
                where=where,
                found=" and ".join(str(entry) for entry in found),
                remedy="uninstall one of them",
            )
        if not found:
            near = ", ".join(difflib.get_close_matches(name, self.names(), 3))
            raise PluginNotFound(
                f"no installed package registers the plugin '{name}'",
                where=where,
                expected=f"an entry point '{name}' in the group {self.group}",
                found="; ".join([*([f"near names: {near}"] if near else []), *self.notes]) or None,
                remedy="install the package that brings it into this environment; `dsx plugins` lists what is there",
            )
        return found[0]


def import_target(entry: Registration) -> Any:
    """The object an entry point names; any failure becomes `PluginInvalid`."""
    module, _, path = entry.target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in filter(None, path.split(".")):
            found = getattr(found, attribute)
    except (Exception, SystemExit) as error:  # a module that ends the process must not end dsx without a word
        raise invalid(entry, f"cannot be imported: {type(error).__name__}: {error}", traceback.format_exc()) from error
    return found


def invalid(entry: Registration, why: str, trace: str | None = None, remedy: str | None = None) -> PluginInvalid:
    """The error about a plugin that is there but cannot be used."""
    text = "\n    ".join(["", *trace.rstrip().splitlines()]) if trace else None
    return PluginInvalid(
        f"the plugin '{entry.name}' {why}",
        where=f"{entry.target}, from {entry.distribution}",
        found=text,
        remedy=remedy,
    )


def _registration(entry: Any, distribution: Any) -> Registration:
    target = f"{entry.module_name}:{entry.object_name}" if entry.object_name else entry.module_name
    if distribution is None:
        return Registration(entry.name, target, "an unnamed distribution")
    return Registration(entry.name, target, f"{_normalised(distribution.name)} {distribution.version}")


def _normalised(name: str | None) -> str:
    return re.sub(r"[-_.]+", "-", name or "unnamed").lower()


def _metadata(group: str) -> Iterable[Registration]:
    """importlib.metadata's view: `entrypoints` misreads distributions whose folder name is not normalised."""
    for distribution in importlib.metadata.distributions():
        try:
            named = group in (distribution.read_text("entry_points.txt") or "")  # most do not, and parsing takes long
            points = [point for point in distribution.entry_points if point.group == group] if named else []
        except Exception:
            continue  # the broken one that `entrypoints` has named already
        # Each look at a distribution's metadata parses its whole file.
        about: Any = distribution.metadata if points else None
        for point in points:
            name = f"{_normalised(about['Name'])} {about['Version']}"
            yield Registration(point.name, point.value.replace(" ", ""), name)
