"""Plugin `warmup_cosine`: linear warm-up, then half a cosine (Loshchilov & Hutter 2017, arXiv 1608.03983, equation 5).

With W = warmup and T = total, update s has the factor

    start + (1 - start) s / W                                      s <= W
    final + (1 - final) (1 + cos(pi (s - W) / (T - W))) / 2        s > W; `final` from T on

on the group's own learning rate.
"""

from __future__ import annotations

import math
from typing import Annotated

from attrs import frozen

from dsx.plugin import Context, Descriptor, Fill, Part, hook, positive, unit_interval
from dsx_schedules.phases import Amount, Factors, between, count, fit, progress, scaled, updates


@frozen(kw_only=True)
class Options:
    """`[optimize.warmup_cosine]`. Learning rates are ratios of each group's own.

    warmup  updates, or a fraction of the total, until the learning rate is the group's own
    start   where it starts from
    total   update at which the cosine ends; by default the last of run.steps
    final   where it ends, from `total` on
    """

    warmup: Amount = 0.05
    start: Annotated[float, unit_interval] = 0.0
    total: Annotated[int, positive] | None = None
    final: Annotated[float, unit_interval] = 0.0


def factor(step: int, warmup: int, total: int, start: float, final: float) -> float:
    """`start` to 1 on a line, then to `final` on half a cosine."""
    if step < warmup:
        return between(start, 1.0, step / warmup)
    return between(1.0, final, (1.0 - math.cos(math.pi * progress(step, warmup, total))) / 2.0)


def build(ctx: Context, options: Options) -> Factors:
    """The schedule. `DsxError` if the total is unknown, or the warm-up longer."""
    total = updates(descriptor.name, options.total, ctx.plan)
    warmup = count(options.warmup, total)
    fit(descriptor.name, {"warmup": warmup}, total)
    return scaled(ctx, descriptor.name, lambda step: factor(step, warmup, total, options.start, options.final))


descriptor = Descriptor(
    name="warmup_cosine",
    section="optimize",
    contract=1,
    options=Options,
    fills={"schedule": Fill()},
    summary="linear warm-up, then half a cosine",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("schedule", lambda ctx: build(ctx, options))]
