"""Plugin `one_cycle`: up to a peak and down again, momentum the other way (Smith 2018, arXiv 1803.09820).

With U = up, D = down, the learning rate goes on straight lines from `start` before the first update to 1 at update U,
to `final` at update U + D, and stays there: ratios of the group's own, which is the peak. Momentum goes from its
largest value to its smallest at the peak, and back. With n stairs a phase has n levels of equal length, the last its
end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated

from attrs import frozen

from dsx.contracts import Hyper, Rule, Schedule
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Part, fraction, hook, non_negative, positive, unit_interval
from dsx_schedules.phases import between, scaled

Momentum = Annotated[float, fraction]


@frozen(kw_only=True)
class Options:
    """`[optimize.one_cycle]`.

    up           updates up to the peak, which is the optimizer's lr
    down         updates down from it; by default as many as up
    start        learning rate before the first update, as a ratio of each group's own
    final        at the end of the cycle, and after it
    up_stairs    levels on the way up; 0: a line
    down_stairs  levels on the way down; 0: a line
    momentum     [smallest, largest], for an optimizer's momentum or the first of its betas; left out, they stay
    """

    up: Annotated[int, positive]
    down: Annotated[int, positive] | None = None
    start: Annotated[float, unit_interval] = 0.1
    final: Annotated[float, unit_interval] = 0.001
    up_stairs: Annotated[int, non_negative] = 0
    down_stairs: Annotated[int, non_negative] = 0
    momentum: tuple[Momentum, Momentum] | None = None

    def __attrs_post_init__(self) -> None:
        for key, stairs, length in (("up", self.up_stairs, self.up), ("down", self.down_stairs, self.fall)):
            if stairs > length:
                raise ValueError(f"{key}_stairs = {stairs} is more than the {length} updates of {key}")
        if self.momentum is not None and self.momentum[0] > self.momentum[1]:
            raise ValueError(f"momentum = {list(self.momentum)} is not in order: give [smallest, largest]")

    @property
    def fall(self) -> int:
        """Updates down from the peak."""
        return self.up if self.down is None else self.down


def climbed(done: int, length: int, stairs: int) -> float:
    """How far a phase has come after `done` of its `length` updates, 1 at its end, in `stairs` levels if not 0."""
    return -(-done * stairs // length) / stairs if stairs else done / length


def cycle(step: int, options: Options, first: float, peak: float, last: float) -> float:
    """`first` to `peak` in the updates up, to `last` in those down, and `last` after them."""
    if step <= options.up:
        return between(first, peak, climbed(step, options.up, options.up_stairs))
    done = min(step - options.up, options.fall)
    return between(peak, last, climbed(done, options.fall, options.down_stairs))


def factor(step: int, options: Options) -> float:
    """`start` to 1 to `final`."""
    return cycle(step, options, options.start, 1.0, options.final)


class MomentumCycle(Schedule):
    """Momentum against the learning rate of `inner`.

    momentum  by update
    key       the hyperparameter that it is: momentum, or betas
    """

    def __init__(self, inner: Schedule, momentum: Callable[[int], float], key: str) -> None:
        self._inner, self._momentum, self._key = inner, momentum, key

    def at(self, step: int, hypers: Mapping[str, Hyper]) -> Mapping[str, Hyper]:
        momentum = self._momentum(step)
        return {group: self._with(hyper, momentum) for group, hyper in self._inner.at(step, hypers).items()}

    def _with(self, hyper: Hyper, momentum: float) -> Hyper:
        return hyper.replace(**{self._key: (momentum, *hyper.betas[1:]) if self._key == "betas" else momentum})


def momentum_key(rule: Rule) -> str:
    """The hyperparameter that is a rule's momentum. `DsxError` if it has none, or one that is switched off."""
    if rule.hyper.get("momentum"):
        return "momentum"
    if "betas" in rule.hyper:
        return "betas"
    off = "momentum" in rule.hyper
    mend = ", or give the optimizer a momentum, such as 0.9" if off else ""
    raise DsxError(
        f"'one_cycle' has no momentum to change: the optimizer's is {'0' if off else 'not there'}",
        where="[optimize.one_cycle] momentum",
        expected="an optimizer with momentum above 0, or with betas",
        found=f"the optimizer's options: {', '.join(rule.hyper) or 'none'}",
        remedy=f"remove optimize.one_cycle.momentum{mend}",
    )


def build(ctx: Context, options: Options) -> Schedule:
    """The schedule. `DsxError` if the optimizer lacks what is to be cycled."""
    rates = scaled(ctx, descriptor.name, lambda step: factor(step, options))
    if options.momentum is None:
        return rates
    smallest, largest = options.momentum
    return MomentumCycle(rates, lambda step: cycle(step, options, largest, smallest, largest), momentum_key(ctx.rule))


descriptor = Descriptor(
    name="one_cycle",
    section="optimize",
    contract=1,
    options=Options,
    fills={"schedule": Fill()},
    summary="one cycle of the learning rate, and of the momentum against it",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("schedule", lambda ctx: build(ctx, options))]
