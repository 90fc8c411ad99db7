"""Plugin `halving`: a schedule that halves the learning rate every so many updates."""

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
    """The rate of update s is the base rate times 0.5 ** ((s - 1) // every)."""

    def __init__(self, every: int) -> None:
        self._every = every

    def at(self, step: int, hypers: Mapping[str, Hyper]) -> Mapping[str, Hyper]:
        factor = 0.5 ** ((step - 1) // self._every)
        return {group: hyper.replace(lr=hyper.lr * factor) for group, hyper in hypers.items()}


fills = {"schedule": Fill()}
descriptor = Descriptor(name="halving", section="optimize", contract=1, options=Options, fills=fills)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("schedule", lambda ctx: Halving(options.every))]
