"""Plugin `wsd`: warm-up, stable, decay (Hu et al. 2024, arXiv 2404.06395; Hägele et al. 2024, arXiv 2405.18392).

With W = warmup, T = total, D = decay and p = (s - (T - D)) / D, update s has the factor

    start + (1 - start) s / W             s <= W
    1                                     W < s <= T - D
    final + (1 - final) f(p)              s > T - D; `final` from T on

on the group's own learning rate, f(p) being 1 - p (linear), 1 - sqrt(p) (sqrt) or (1 + cos(pi p)) / 2 (cosine).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

from attrs import frozen

from dsx.plugin import Context, Descriptor, Fill, Part, hook, positive, unit_interval
from dsx_schedules.phases import Amount, Factors, between, count, fit, progress, scaled, updates

Shape = Literal["linear", "sqrt", "cosine"]

SHAPES: Mapping[Shape, Callable[[float], float]] = {
    "linear": lambda part: part,
    "sqrt": math.sqrt,
    "cosine": lambda part: (1.0 - math.cos(math.pi * part)) / 2.0,
}
"""How much of the decay is done, by how much of its time is."""


@frozen(kw_only=True)
class Options:
    """`[optimize.wsd]`. Learning rates are ratios of each group's own.

    warmup  updates, or a fraction of the total, until the learning rate is the group's own
    decay   the last updates, or a fraction of the total, in which it falls
    shape   of the decay
    start   where it starts from
    total   update at which it ends; by default the last of run.steps
    final   where it ends, from `total` on
    """

    warmup: Amount = 0.05
    decay: Amount = 0.1
    shape: Shape = "sqrt"
    start: Annotated[float, unit_interval] = 0.0
    total: Annotated[int, positive] | None = None
    final: Annotated[float, unit_interval] = 0.0


def factor(step: int, warmup: int, decay: int, total: int, shape: Shape, start: float, final: float) -> float:
    """`start` to 1 on a line, 1, then to `final` in the last `decay` updates."""
    if step < warmup:
        return between(start, 1.0, step / warmup)
    return between(1.0, final, SHAPES[shape](progress(step, total - decay, total)))


def build(ctx: Context, options: Options) -> Factors:
    """The schedule. `DsxError` if the total is unknown, or warm-up and decay do not fit into it."""
    total = updates(descriptor.name, options.total, ctx.plan)
    warmup, decay = count(options.warmup, total), count(options.decay, total)
    fit(descriptor.name, {"warmup": warmup, "decay": decay}, total)
    return scaled(
        ctx,
        descriptor.name,
        lambda step: factor(step, warmup, decay, total, options.shape, options.start, options.final),
    )


descriptor = Descriptor(
    name="wsd",
    section="optimize",
    contract=1,
    options=Options,
    fills={"schedule": Fill()},
    summary="warm-up, stable, decay",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("schedule", lambda ctx: build(ctx, options))]
