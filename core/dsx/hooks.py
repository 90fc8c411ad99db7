"""The five hooks and the observers' one: how core asks plugins for parts, once per run, at set-up.

A pluggy call costs fifteen to thirty method calls, so no hook is called while training: hooks return parts, and the
engine holds those.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterable
from typing import Any

import pluggy

from dsx.entries import invalid
from dsx.errors import DsxError
from dsx.plugin import Part, Plan
from dsx.registry import Plugin
from dsx.roles import SECTIONS

_spec = pluggy.HookspecMarker("dsx")

_CONTRACT = f"the hooks are {', '.join(f'dsx_{section}' for section in SECTIONS)}; each may take `options` and `plan`"


class Specs:
    """What plugins implement; each is called with the plugin's own options and the run's plan."""

    @_spec
    def dsx_precision(self, options: Any, plan: Plan) -> Iterable[Part]:  # type: ignore[empty-body]
        """Roles dtypes, guard, scaler."""

    @_spec
    def dsx_communicate(self, options: Any, plan: Plan) -> Iterable[Part]:  # type: ignore[empty-body]
        """Roles transport, wrappers."""

    @_spec
    def dsx_partition(self, options: Any, plan: Plan) -> Iterable[Part]:  # type: ignore[empty-body]
        """Roles layout, tiers, activations."""

    @_spec
    def dsx_optimize(self, options: Any, plan: Plan) -> Iterable[Part]:  # type: ignore[empty-body]
        """Roles groups, rule, stepper, schedule."""

    @_spec
    def dsx_attention(self, options: Any, plan: Plan) -> Iterable[Part]:  # type: ignore[empty-body]
        """Role attention."""

    @_spec
    def dsx_observe(self, options: Any, plan: Plan) -> Iterable[Part]:  # type: ignore[empty-body]
        """Role observers."""


class Hooks:
    """A typed front over pluggy's untyped relay; lives only while a run is set up."""

    def __init__(self, plugins: Iterable[Plugin]) -> None:
        self._manager = pluggy.PluginManager("dsx")
        self._manager.add_hookspecs(Specs)
        self._plugins = tuple(plugins)
        for plugin in self._plugins:
            self._register(plugin)

    def parts(self, plugin: Plugin, options: Any, plan: Plan) -> list[Part]:
        """Call one plugin's hook; what it returns is checked against what its descriptor promised to fill."""
        others = [other.carrier for other in self._plugins if other.carrier is not plugin.carrier]
        caller = self._manager.subset_hook_caller(f"dsx_{plugin.descriptor.section}", others)
        try:
            results = caller(options=options, plan=plan)
            parts = [part for result in results for part in result]
        except DsxError:
            raise  # what its user can mend
        except Exception as error:
            raise invalid(plugin.registration, f"fails in its hook: {error}", traceback.format_exc()) from error
        for part in parts:
            if not isinstance(part, Part):
                raise invalid(plugin.registration, f"returns {part!r} from its hook", remedy="return a list of Part")
        promised, returned = sorted(plugin.descriptor.filled(options)), sorted(part.role for part in parts)
        if promised != returned:
            raise invalid(
                plugin.registration,
                f"returns parts for {', '.join(returned) or 'no role'}",
                remedy=f"its descriptor fills {', '.join(promised) or 'no role'}: make the two agree",
            )
        return parts

    def _register(self, plugin: Plugin) -> None:
        entry, section = plugin.registration, plugin.descriptor.section
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                self._manager.register(plugin.carrier, plugin.name)
                self._manager.check_pending()
            except (pluggy.PluginValidationError, Warning, ValueError, TypeError) as error:
                why = f"breaks the hook contract: {str(error).splitlines()[-1].strip()}"
                raise invalid(entry, why, remedy=_CONTRACT) from error
        callers = self._manager.get_hookcallers(plugin.carrier) or []
        if not any(caller.name == f"dsx_{section}" for caller in callers):
            raise invalid(
                entry, f"has no hook dsx_{section}", remedy=f"mark a function dsx_{section} with dsx.plugin.hook"
            )
        for caller in callers:
            self._refuse_wrappers(plugin, caller)

    @staticmethod
    def _refuse_wrappers(plugin: Plugin, caller: Any) -> None:
        for implementation in caller.get_hookimpls():
            if implementation.plugin is plugin.carrier and (implementation.wrapper or implementation.hookwrapper):
                raise invalid(
                    plugin.registration, f"wraps the hook {caller.name}", remedy="return parts; a part may wrap another"
                )
