"""What schedules share: how far a phase has come, and the schedule that multiplies learning rates by a factor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from dsx.contracts import Hyper, Schedule
from dsx.errors import DsxError
from dsx.plugin import Context, Plan, non_negative, unit_interval

Factor = Callable[[int], float]
"""From the number of an update, from 1, to what every group's own learning rate is multiplied by."""

Amount = Annotated[int, non_negative] | Annotated[float, unit_interval]
"""A whole number of updates, or a fraction of `total`: 100 or 0.05."""


class Factors(Schedule):
    """Multiplies the learning rate of every group by `factor(step)`; groups keep their proportions."""

    def __init__(self, factor: Factor) -> None:
        self._factor = factor

    def at(self, step: int, hypers: Mapping[str, Hyper]) -> Mapping[str, Hyper]:
        factor = self._factor(step)
        return {group: hyper.replace(lr=hyper.lr * factor) for group, hyper in hypers.items()}


def scaled(ctx: Context, name: str, factor: Factor) -> Factors:
    """The schedule called `name`. `DsxError` if the optimizer has no learning rate."""
    if "lr" not in ctx.rule.hyper:
        raise DsxError(
            f"'{name}' has no learning rate to change",
            where=f"[optimize] use = [..., '{name}']",
            found=f"the optimizer's options: {', '.join(ctx.rule.hyper) or 'none'}",
            remedy=f"remove '{name}', or choose an optimizer with an option lr",
        )
    return Factors(factor)


def progress(step: int, begin: int, end: int) -> float:
    """How far `step` is from `begin` to `end`: 0 up to `begin`, 1 from `end` on; if they are one, a jump."""
    if step <= begin:
        return 0.0
    return 1.0 if step >= end else (step - begin) / (end - begin)


def between(first: float, last: float, part: float) -> float:
    """`first` at part 0, `last` at part 1, both exact, and the straight line in between."""
    return first * (1.0 - part) + last * part


def updates(name: str, total: int | None, plan: Plan) -> int:
    """How many updates a schedule spans: `total`, or else those of the run. `DsxError` if nobody says."""
    found = total or plan.steps
    if found is None:
        raise DsxError(
            f"'{name}' must know how many updates it spans, and neither total nor run.steps is set",
            where=f"[optimize.{name}] total",
            expected="a whole number of updates",
            remedy=f"set optimize.{name}.total, or run.steps",
        )
    return found


def count(amount: int | float, total: int) -> int:
    """Updates that an `Amount` means; fractions are rounded."""
    return amount if isinstance(amount, int) else round(amount * total)


def fit(name: str, phases: Mapping[str, int], total: int) -> None:
    """`DsxError` if the phases, in updates by the key of each, do not fit into `total`."""
    if sum(phases.values()) > total:
        keys = " and ".join(phases)
        raise DsxError(
            f"{keys} of '{name}' take {' + '.join(map(str, phases.values()))} updates, but it spans only {total}",
            where=f"[optimize.{name}] {keys}",
            expected=f"at most {total} updates",
            remedy=f"shorten {keys}, or raise optimize.{name}.total or run.steps",
        )
