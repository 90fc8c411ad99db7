"""From a manifest to a resolved run: which plugin fills each role, with which options, and whether they go together.

Everything here is decided from data, before any hook is called and anything is allocated.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from attrs import frozen

from dsx.entries import invalid
from dsx.errors import CapabilityMissing, DsxError, SlotConflict
from dsx.manifest import Manifest
from dsx.plugin import Fill, Need
from dsx.registry import Plugin, Registry
from dsx.roles import BUILD_ORDER, ROLES, SECTIONS

NULL_OFFERS: Mapping[str, frozenset[str]] = {
    "rule": frozenset({"rule.silent", "rule.elementwise"}),
    "transport": frozenset({"transport.exact"}),
    "layout": frozenset({"gradients.early", "gradients.local", "optimizer.whole", "parameter.whole"}),
}
"""What core's own parts offer."""


@frozen
class Filler:
    """A plugin in its role.

    where  the manifest line that names it
    """

    plugin: Plugin
    options: Any
    fill: Fill
    where: str


@frozen
class Resolved:
    """Who fills what.

    plugins  in manifest order, each with its options
    fillers  by role, in manifest order; a role without an entry has its null part
    """

    manifest: Manifest
    plugins: tuple[tuple[Plugin, Any], ...]
    fillers: Mapping[str, tuple[Filler, ...]]

    def offers(self) -> frozenset[str]:
        """Capabilities of the parts that finally fill the roles, null parts included."""
        offered: set[str] = set()
        for role in BUILD_ORDER:
            fillers = self.fillers.get(role.name, ())
            offered |= set(NULL_OFFERS.get(role.name, ())) if not fillers else set()
            offered.update(*(filler.fill.offers for filler in fillers))
        return frozenset(offered)

    def needs(self) -> frozenset[str]:
        """Capabilities that a plugin asks for."""
        every = (filler for fillers in self.fillers.values() for filler in fillers)
        return frozenset(need.capability for filler in every for need in filler.fill.needs)

    def names(self) -> Mapping[str, tuple[str, ...]]:
        """Names of the plugins in each role; empty for a null part."""
        return {role.name: tuple(f.plugin.name for f in self.fillers.get(role.name, ())) for role in BUILD_ORDER}


def resolve(manifest: Manifest, registry: Registry) -> Resolved:
    """Load the plugins a manifest names and give each its roles.

    Raises `PluginNotFound`, `PluginInvalid`, `ManifestError` (all problems of all options at once), `SlotConflict` and
    `CapabilityMissing`.
    """
    used = [(section, name) for section in SECTIONS for name in getattr(manifest, section).use]
    plugins = [_load(manifest, registry, section, name) for section, name in used]
    options = manifest.check_options(
        {place: plugin.descriptor.options for place, plugin in zip(used, plugins, strict=True)}
    )
    fillers: dict[str, list[Filler]] = {}
    for (section, name), plugin in zip(used, plugins, strict=True):
        chosen = options[section, name]
        for role, fill in _fills(plugin, chosen).items():
            _check_role(plugin, role)
            fillers.setdefault(role, []).append(Filler(plugin, chosen, fill, _where(manifest, section, name)))
    pairs = tuple((plugin, options[place]) for place, plugin in zip(used, plugins, strict=True))
    resolved = Resolved(manifest, pairs, {role: tuple(several) for role, several in fillers.items()})
    _refuse_conflicts(resolved)
    _refuse_missing(resolved)
    return resolved


def _where(manifest: Manifest, section: str, name: str) -> str:
    return f"'{name}' in {section}.use ({manifest.origin(f'{section}.use')})"


def _load(manifest: Manifest, registry: Registry, section: str, name: str) -> Plugin:
    where = _where(manifest, section, name)
    plugin = registry.load(name, where)
    if plugin.descriptor.section != section:
        raise SlotConflict(
            f"the plugin '{name}' does not belong in [{section}]",
            where=where,
            remedy=f"name it in [{plugin.descriptor.section}]",
        )
    return plugin


def _fills(plugin: Plugin, options: Any) -> Mapping[str, Fill]:
    try:
        return dict(plugin.descriptor.filled(options))
    except DsxError:
        raise  # what its user can mend
    except Exception as error:
        why = f"cannot say what it fills: {type(error).__name__}: {error}"
        raise invalid(plugin.registration, why, traceback.format_exc()) from error


def _check_role(plugin: Plugin, role: str) -> None:
    section = plugin.descriptor.section
    if role not in ROLES or ROLES[role].section != section:
        valid = ", ".join(known.name for known in BUILD_ORDER if known.section == section)
        raise invalid(plugin.registration, f"fills a role '{role}'", remedy=f"the roles of [{section}] are {valid}")


def _refuse_conflicts(resolved: Resolved) -> None:
    for role, fillers in resolved.fillers.items():
        if ROLES[role].kind == "one" and len(fillers) > 1:
            raise SlotConflict(
                f"{' and '.join(repr(filler.plugin.name) for filler in fillers)} both fill the role '{role}'",
                where="; ".join(filler.where for filler in fillers),
                expected="one plugin for this role",
                remedy=f"keep one of them in [{ROLES[role].section}]",
            )


def _refuse_missing(resolved: Resolved) -> None:
    offered = resolved.offers()
    for role, fillers in resolved.fillers.items():
        for filler in fillers:
            for need in filler.fill.needs:
                if need.capability not in offered:
                    raise _missing(resolved, role, filler, need)


def _missing(resolved: Resolved, role: str, filler: Filler, need: Need) -> CapabilityMissing:
    remedy, owner = "add a plugin that offers it", need.capability.partition(".")[0]
    if owner in ROLES:
        fillers = resolved.fillers.get(owner, ())
        having = ", ".join(f"'{other.plugin.name}'" for other in fillers) or f"core's own {owner}"
        remedy = f"{having} does not offer it: choose another plugin for the role {owner} that does"
    for other, offers in NULL_OFFERS.items():
        if need.capability in offers and (displaced := resolved.fillers.get(other)):
            names = ", ".join(f"'{instead.plugin.name}'" for instead in displaced)
            remedy = (
                f"core's own {other} offers it: remove {names} from [{ROLES[other].section}], or '{filler.plugin.name}'"
            )
    reason = f": {need.reason}" if need.reason else ""
    return CapabilityMissing(
        f"'{filler.plugin.name}' needs '{need.capability}', which nothing in this run offers{reason}",
        where=f"{filler.where}, role {role}",
        found=f"offered in this run: {', '.join(sorted(resolved.offers())) or 'nothing'}",
        remedy=remedy,
    )
