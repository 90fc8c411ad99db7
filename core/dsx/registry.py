"""Loads plugins by name and checks their descriptors. A name is imported only when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
from attrs import field, frozen

from dsx.contracts import CONTRACT
from dsx.entries import PLUGINS, Entries, Registration, import_target, invalid
from dsx.plugin import Descriptor
from dsx.roles import SECTIONS


@frozen
class Plugin:
    """A loaded plugin: its registration, its descriptor, and the object that carries its hook."""

    registration: Registration
    descriptor: Descriptor
    carrier: Any

    @property
    def name(self) -> str:
        return self.registration.name


@frozen
class Registry:
    """The plugins that installed packages register, and those handed over by the caller.

    given  by name: modules or objects with a descriptor and a hook, as an entry point would name them; they come first
    """

    entries: Entries
    given: Mapping[str, Any] = field(factory=dict)

    @classmethod
    def scan(cls, given: Mapping[str, Any] | None = None) -> Registry:
        return cls(Entries.scan(PLUGINS), given or {})

    def load(self, name: str, where: str | None = None) -> Plugin:
        """Import a plugin and check its descriptor. Raises `PluginInvalid`, with the traceback of a failing import."""
        if name in self.given:
            carrier = self.given[name]
            entry = Registration(name, getattr(carrier, "__name__", type(carrier).__name__), "given by the caller")
        else:
            entry = self.entries.find(name, where)
            carrier = import_target(entry)
        return Plugin(entry, _checked(entry, getattr(carrier, "descriptor", None)), carrier)


def _checked(entry: Registration, descriptor: object) -> Descriptor:
    if not isinstance(descriptor, Descriptor):
        raise invalid(entry, "has no descriptor", remedy="give it an attribute `descriptor`, a dsx.plugin.Descriptor")
    if descriptor.contract != CONTRACT:
        raise invalid(
            entry,
            f"was written for version {descriptor.contract} of the contracts, this is version {CONTRACT}",
            remedy="install a version of it that matches this dsx",
        )
    if descriptor.name != entry.name:
        raise invalid(entry, f"calls itself '{descriptor.name}'", remedy="give entry point and descriptor one name")
    if descriptor.section not in SECTIONS:
        raise invalid(entry, f"names a section '{descriptor.section}'", remedy=f"use one of {', '.join(SECTIONS)}")
    if descriptor.options is not None and not attrs.has(descriptor.options):
        raise invalid(entry, f"has options {descriptor.options!r}", remedy="make them an attrs class, or None for none")
    return descriptor
