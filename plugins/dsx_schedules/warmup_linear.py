"""Plugin `warmup_linear`: linear warm-up, then constant or a linear decay.

With W = warmup and T = total, update s has the factor

    start + (1 - start) s / W                 s <= W
    1 - (1 - final) (s - W) / (T - W)         s > W, if it decays; `final` from T on

on the group's own learning rate: the first update has one W-th of it and update W all of it, so that no update is made
with a learning rate of 0. As DeepSpeed's WarmupLR and WarmupDecayLR, type linear, whose count lags by two updates.
"""

from __future__ import annotations

from dsx.plugin import Descriptor, Fill, Part, hook
from dsx_schedules.warmup import Options, build


def curve(step: int, warmup: int) -> float:
    """The straight line that is 0 before the first update and 1 at update `warmup`."""
    return step / warmup


descriptor = Descriptor(
    name="warmup_linear",
    section="optimize",
    contract=1,
    options=Options,
    fills={"schedule": Fill()},
    summary="linear warm-up, then constant or linear decay",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("schedule", lambda ctx: build(ctx, descriptor.name, options, curve))]
