"""Plugin `warmup_log`: logarithmic warm-up, fast at first, then constant or a linear decay.

With W = warmup and T = total, update s has the factor

    start + (1 - start) log(1 + s) / log(1 + W)     s <= W
    1 - (1 - final) (s - W) / (T - W)               s > W, if it decays; `final` from T on

on the group's own learning rate. DeepSpeed's WarmupLR has log(1 + i) / log(W), i being s - 2, which makes the first two
updates with a learning rate of 0 and has no value for W = 1.
"""

from __future__ import annotations

import math

from dsx.plugin import Descriptor, Fill, Part, hook
from dsx_schedules.warmup import Options, build


def curve(step: int, warmup: int) -> float:
    """The logarithm that is 0 before the first update and 1 at update `warmup`."""
    return math.log1p(step) / math.log1p(warmup)


descriptor = Descriptor(
    name="warmup_log",
    section="optimize",
    contract=1,
    options=Options,
    fills={"schedule": Fill()},
    summary="logarithmic warm-up, then constant or linear decay",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("schedule", lambda ctx: build(ctx, descriptor.name, options, curve))]
