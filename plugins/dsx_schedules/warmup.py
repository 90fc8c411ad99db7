"""What the plugins `warmup_linear` and `warmup_log` share: all but the curve of the warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from attrs import frozen

from dsx.plugin import Context, Plan, positive, unit_interval
from dsx_schedules.phases import Amount, Factors, between, count, fit, progress, scaled, updates

Curve = Callable[[int, int], float]
"""How much of the warm-up of `warmup` updates is done at update `step` of it: 1 at the last."""


@frozen(kw_only=True)
class Options:
    """`[optimize.warmup_linear]` and `[optimize.warmup_log]`. Learning rates are ratios of each group's own.

    warmup  updates, or a fraction of the total, until the learning rate is the group's own
    start   where it starts from
    total   decay until this update; by default that of run.steps, if `final` is set
    final   where it ends, from `total` on; 0 if only `total` is set; with neither there is no decay
    """

    warmup: Amount = 0.05
    start: Annotated[float, unit_interval] = 0.0
    total: Annotated[int, positive] | None = None
    final: Annotated[float, unit_interval] | None = None

    @property
    def decays(self) -> bool:
        return self.total is not None or self.final is not None


def factor(step: int, curve: Curve, warmup: int, total: int | None, start: float, final: float) -> float:
    """`start` to 1 along the curve, then constant, or with `total` linear to `final`."""
    if step < warmup:
        return between(start, 1.0, curve(step, warmup))
    return 1.0 if total is None else between(1.0, final, progress(step, warmup, total))


def resolve(name: str, options: Options, plan: Plan) -> tuple[int, int | None]:
    """(updates of the warm-up, update at which the decay ends; None: no decay). `DsxError` if they do not fit."""
    known = options.total or plan.steps
    if options.decays or isinstance(options.warmup, float):
        known = updates(name, options.total, plan)
    warmup = count(options.warmup, known or 0)
    if known is not None:
        fit(name, {"warmup": warmup}, known)
    return warmup, known if options.decays else None


def build(ctx: Context, name: str, options: Options, curve: Curve) -> Factors:
    """The schedule of either plugin."""
    warmup, total = resolve(name, options, ctx.plan)
    final = options.final or 0.0
    return scaled(ctx, name, lambda step: factor(step, curve, warmup, total, options.start, final))
