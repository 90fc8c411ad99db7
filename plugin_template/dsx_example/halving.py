"""Plugin `halving`: a schedule that halves the learning rate every so many updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from attrs import frozen

from dsx.contracts import Hyper, Schedule
from dsx.plugin import Descriptor, Fill, Part, hook, positive


@frozen(kw_only=True)
class Options:
    """`[optimize.halving]`. every: updates between two halvings"""

    every: Annotated[int, positive] = 1000


class Halving(Schedule):
    """Update number s has the base rate times 0.5 ** ((s - 1) // every)."""

    def __init__(self, every: int) -> None:
        self._every = every

    def at(self, step: int, hypers: Mapping[str, Hyper]) -> Mapping[str, Hyper]:
        return {name: hyper.replace(lr=hyper.lr * 0.5 ** ((step - 1) // self._every)) for name, hyper in hypers.items()}


descriptor = Descriptor(
    name="halving", section="optimize", contract=1, options=Options, fills={"schedule": Fill()},
    summary="halves the learning rate every so many updates",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("schedule", lambda ctx: Halving(options.every))]
