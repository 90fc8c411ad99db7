"""Plugin `lr_range_test`: a learning rate that grows until training fails, to find the largest that works.

Smith 2017 (arXiv 1506.01186, section 3.3). Update s has the factor

    start (1 + growth (s - 1) / every)

on the group's own learning rate; with `staircase` the quotient is rounded down.
"""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from dsx.plugin import Descriptor, Fill, Part, hook, positive
from dsx_schedules.phases import scaled


@frozen(kw_only=True)
class Options:
    """`[optimize.lr_range_test]`.

    start      the first learning rate, as a ratio of each group's own
    growth     what is added every `every` updates, in multiples of the first
    every      updates
    staircase  add it at once, instead of a little at each update
    """

    start: Annotated[float, positive] = 0.01
    growth: Annotated[float, positive] = 1.0
    every: Annotated[int, positive] = 100
    staircase: bool = False


def factor(step: int, options: Options) -> float:
    """Linear growth from `start` at the first update."""
    done = (step - 1) // options.every if options.staircase else (step - 1) / options.every
    return options.start * (1.0 + options.growth * done)


descriptor = Descriptor(
    name="lr_range_test",
    section="optimize",
    contract=1,
    options=Options,
    fills={"schedule": Fill()},
    summary="a learning rate that grows, to find the largest that works",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("schedule", lambda ctx: scaled(ctx, descriptor.name, lambda step: factor(step, options)))]
