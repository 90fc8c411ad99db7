"""What a plugin is made of: a descriptor, an options class, and a hook that returns parts.

    from typing import Annotated
    from attrs import frozen
    from dsx.contracts import Schedule
    from dsx.plugin import Descriptor, Fill, Part, hook, positive

    @frozen(kw_only=True)
    class Options:
        every: Annotated[int, positive] = 1000

    descriptor = Descriptor(name="halving", section="optimize", contract=1, options=Options, fills={"schedule": Fill()})

    @hook
    def dsx_optimize(options):
        return [Part("schedule", lambda ctx: Halving(options.every))]

The module (or any object with these attributes) is registered in the entry-point group `dsx.plugins` under the
descriptor's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import pluggy
import torch
from attrs import Factory, define, field, frozen
from torch import nn

from dsx.contracts import (
    Dtypes,
    Groups,
    Guard,
    Layout,
    Rule,
    Scaler,
    Schedule,
    Stepper,
    Store,
    Transport,
    Unit,
)
from dsx.errors import DsxError, ManifestError
from dsx.manifest.convert import structure
from dsx.manifest.ranges import Range, choice, fraction, non_negative, positive, unit_interval
from dsx.roles import Section

hook = pluggy.HookimplMarker("dsx")
"""Marks the plugin's function for its section: dsx_precision, dsx_communicate, dsx_partition, dsx_optimize,
dsx_attention or dsx_observe. It may take `options` and `plan`, both or neither, and returns a list of `Part`."""


@frozen
class Need:
    """A capability that a part cannot do without.

    capability  a dotted word that some other part of the run offers, e.g. "gradients.local"
    reason      for people: why
    """

    capability: str
    reason: str = ""


_T = TypeVar("_T")


def read_options(table: Mapping[str, object], cls: type[_T], key: str) -> _T:
    """A table within a plugin's options as an attrs class of its own, read as strictly as the options themselves.

    key  its dotted path, for messages

    Raises `ManifestError` with every problem at once.
    """
    made, problems = structure(table, cls, key)
    if made is None or problems:
        raise ManifestError(problems)
    return made


def _needs(needs: Iterable[str | Need]) -> tuple[Need, ...]:
    return tuple(Need(need) if isinstance(need, str) else need for need in needs)


def _offers(offers: Iterable[str]) -> frozenset[str]:
    return frozenset(offers)


@frozen
class Fill:
    """What a plugin promises and wants for one role. Pure data, matched before anything is built.

    offers  capabilities that this part brings to the run
    needs   capabilities that it cannot do without
    """

    offers: frozenset[str] = field(default=(), converter=_offers)
    needs: tuple[Need, ...] = field(default=(), converter=_needs)


@frozen
class Descriptor:
    """What core may know of a plugin before calling it.

    name      as in manifests; the same as the entry point's
    section   of the manifest in which it may be used
    contract  the version of `dsx.contracts` it was written for
    fills     by role; or a function from its options to that
    options   attrs class of its options table, every field with a default or required; None: it takes none
    summary   one line for `dsx plugins` and `dsx explain`
    explain   from its options, lines for `dsx explain --SECTION`: what a table cannot show
    notes     from its options and run.steps (None: not said) to what people should know of such a run before they start
              it; `dsx explain` shows them
    """

    name: str
    section: Section
    contract: int
    fills: Mapping[str, Fill] | Callable[[Any], Mapping[str, Fill]]
    options: type[Any] | None = None
    summary: str = ""
    explain: Callable[[Any], Iterable[str]] = lambda options: ()
    notes: Callable[[Any, int | None], Iterable[str]] = lambda options, steps: ()

    def filled(self, options: Any) -> Mapping[str, Fill]:
        """What it fills with these options."""
        return self.fills(options) if callable(self.fills) else self.fills


@frozen
class Part:
    """One object for one role, not built yet.

    role   that it fills
    build  called once with the context, in core's order of roles
    bind   called once with the built object and the context, when every part is built
    """

    role: str
    build: Callable[[Context], Any]
    bind: Callable[[Any, Context], None] | None = None


@frozen
class Plan:
    """What is known of a run before its parts are built. The same on every rank but for `rank` and `device`.

    fillers       names of the plugins that fill each role, in manifest order; empty: the null part
    offers        capabilities in the run
    needs         those that a plugin of the run asks for
    world         size of the data axis, over which gradients are averaged
    accumulation  micro-batches of one update
    steps         updates planned, if the manifest says
    device        on which the model is
    """

    fillers: Mapping[str, tuple[str, ...]]
    offers: frozenset[str]
    needs: frozenset[str]
    rank: int
    world: int
    accumulation: int
    steps: int | None
    seed: int
    device: torch.device


_EARLY_PARTS, _EARLY_BYTES = 64, 2_000_000
"""The first unit's gradients are final last and its parameters used first: what is done with them is waited for. With
states of 25 M parameters in files, and their update beside training, a step of 9 parts took 1.24 times as long as one
without files, of 33 parts 1.12, of 49 parts 1.14; with 100 M parameters in 15, 57 and 85 parts 1.24, 1.12 and 1.08."""


@define
class Context:
    """What a builder sees: the plan, the model, and the parts built before it.

    model    the module itself, where a compiled one was given
    flatten  cuts the model into units and flat parameters: `flatten(limit_bytes=None)`; for layouts
    """

    plan: Plan
    model: nn.Module
    flatten: Callable[..., Sequence[Unit]]
    parts: dict[str, Any] = Factory(dict)

    def _part(self, role: str) -> Any:
        if role not in self.parts:
            raise DsxError(
                f"the part '{role}' is not built yet",
                remedy="parts are built in the order of dsx.roles.BUILD_ORDER; use `bind` for what comes later",
            )
        return self.parts[role]

    def early_bytes(self) -> int | None:
        """Size at which a layout does well to cut flat parameters, since a plugin acts on a gradient as soon as it is
        final; None: no plugin does. Only once the dtypes are built."""
        if "gradients.early" not in self.plan.needs:
            return None
        trained = ((name, each) for name, each in self.model.named_parameters() if each.is_floating_point())
        size = sum(each.numel() * self.dtypes.param(name, each.dtype).itemsize for name, each in trained)
        return max(_EARLY_BYTES, size // _EARLY_PARTS)

    @property
    def dtypes(self) -> Dtypes:
        return self._part("dtypes")  # type: ignore[no-any-return]

    @property
    def groups(self) -> Groups:
        return self._part("groups")  # type: ignore[no-any-return]

    @property
    def rule(self) -> Rule:
        return self._part("rule")  # type: ignore[no-any-return]

    @property
    def transport(self) -> Transport:
        """With its wrappers, once those are built."""
        return self._part("transport")  # type: ignore[no-any-return]

    @property
    def guard(self) -> Guard:
        return self._part("guard")  # type: ignore[no-any-return]

    @property
    def scaler(self) -> Scaler:
        return self._part("scaler")  # type: ignore[no-any-return]

    @property
    def store(self) -> Store:
        """The tiers, as one store."""
        return self._part("tiers")  # type: ignore[no-any-return]

    @property
    def layout(self) -> Layout:
        return self._part("layout")  # type: ignore[no-any-return]

    @property
    def stepper(self) -> Stepper:
        return self._part("stepper")  # type: ignore[no-any-return]

    @property
    def schedule(self) -> Schedule:
        return self._part("schedule")  # type: ignore[no-any-return]


__all__ = [
    "Context",
    "Descriptor",
    "Fill",
    "Need",
    "Part",
    "Plan",
    "Range",
    "choice",
    "fraction",
    "hook",
    "non_negative",
    "positive",
    "read_options",
    "unit_interval",
]
