"""Plugin `dynamic_loss_scale`: the largest loss scale at which gradients do not overflow, found as training goes on.

After `window` updates in a row without overflow the scale grows by `factor`. At an overflow the update is skipped, and
the scale shrinks by `factor`, down to `minimum`; of `hysteresis` overflows the first `hysteresis` - 1 only skip. How
many of these are left is set back by the next growth, or with `consecutive_hysteresis` by any update without overflow.
An overflow at the minimum that would shrink the scale ends training, or with `at_minimum = "continue"` only skips.

With hysteresis 1 this is torch's GradScaler (growth_interval = window, growth_factor = factor, backoff_factor = 1 /
factor); with another, it is the rule that DeepSpeed documents for `loss_scale_window`, `hysteresis`,
`consecutive_hysteresis` and `min_loss_scale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from attrs import frozen

from dsx.plugin import Descriptor, Fill, Part, hook, positive
from dsx_precision.scaling import SCALED, LossScale, above_one


@frozen(kw_only=True)
class Options:
    """`[precision.dynamic_loss_scale]`.

    initial                 scale of the first update
    window                  updates in a row without overflow after which the scale grows
    factor                  by which it grows and shrinks
    hysteresis              overflows until it shrinks
    consecutive_hysteresis  count only overflows in a row; false: all since it last grew
    minimum                 below which it does not shrink
    at_minimum              what an overflow at the minimum does: `raise` ends training with the name of what
                            overflowed, `continue` skips the update
    """

    initial: Annotated[float, positive] = 65536.0
    window: Annotated[int, positive] = 2000
    factor: Annotated[float, above_one] = 2.0
    hysteresis: Annotated[int, positive] = 1
    consecutive_hysteresis: bool = False
    minimum: Annotated[float, positive] = 1.0
    at_minimum: Literal["raise", "continue"] = "raise"

    def __attrs_post_init__(self) -> None:
        if self.initial < self.minimum:
            raise ValueError(f"initial = {self.initial:g} is below minimum = {self.minimum:g}")


class DynamicLossScale(LossScale):
    """The rule above.

    good  updates without overflow since the last one, or since the scale last grew
    left  overflows until the scale shrinks
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options.initial)
        self._options = options
        self.good, self.left = 0, options.hysteresis

    def update(self, finite: bool) -> None:
        if finite:
            self._grow()
        else:
            self._shrink()

    def _grow(self) -> None:
        options = self._options
        self.good += 1
        grows = self.good == options.window
        if grows or options.consecutive_hysteresis:
            self.left = options.hysteresis
        if grows:
            self.good = 0
            grown = self.value * options.factor
            self.value = grown if math.isfinite(grown) else self.value

    def _shrink(self) -> None:
        options = self._options
        self.good = 0
        if self.left > 1:
            self.left -= 1
        elif self.value > options.minimum:
            self.value = max(self.value / options.factor, options.minimum)
        elif options.at_minimum == "raise":
            raise self.halt(
                f"gradients overflow at the smallest loss scale, {options.minimum:g}",
                "look at the data and the learning rate of this update; a smaller "
                "precision.dynamic_loss_scale.minimum, keeping the module in fp32, or bf16 give more range",
            )

    def state(self) -> Mapping[str, Any]:
        return {"value": self.value, "good": self.good, "left": self.left}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value = max(state["value"], self._options.minimum)
        self.good, self.left = state["good"] % self._options.window, min(state["left"], self._options.hysteresis)


descriptor = Descriptor(
    name="dynamic_loss_scale",
    section="precision",
    contract=1,
    options=Options,
    fills={"scaler": Fill(offers=[SCALED])},
    summary="a loss scale that grows until gradients overflow, and then shrinks",
)


@hook
def dsx_precision(options: Options) -> list[Part]:
    return [Part("scaler", lambda ctx: DynamicLossScale(options), lambda part, ctx: part.bind(ctx))]
