"""Plugin `static_loss_scale`: the loss times one number."""

from __future__ import annotations

from typing import Annotated, Literal

from attrs import frozen

from dsx.plugin import Descriptor, Fill, Part, hook, positive
from dsx_precision.scaling import SCALED, LossScale


@frozen(kw_only=True)
class Options:
    """`[precision.static_loss_scale]`.

    scale        of the loss
    at_overflow  `continue`: the update is skipped and training goes on; `raise`: it ends, with the name of what
                 overflowed
    """

    scale: Annotated[float, positive]
    at_overflow: Literal["continue", "raise"] = "continue"


class StaticLossScale(LossScale):
    """The same scale in every update; an update with a gradient that is not finite is skipped, or ends training."""

    def __init__(self, options: Options) -> None:
        super().__init__(options.scale)
        self._raises = options.at_overflow == "raise"

    def update(self, finite: bool) -> None:
        if not finite and self._raises:
            raise self.halt(
                f"gradients are not finite at the loss scale {self.value:g}",
                "take a smaller precision.static_loss_scale.scale or learning rate, or at_overflow = 'continue'",
            )


descriptor = Descriptor(
    name="static_loss_scale",
    section="precision",
    contract=1,
    options=Options,
    fills={"scaler": Fill(offers=[SCALED])},
    summary="the loss times one number, so that small gradients survive 16 bits",
)


@hook
def dsx_precision(options: Options) -> list[Part]:
    return [Part("scaler", lambda ctx: StaticLossScale(options), lambda part, ctx: part.bind(ctx))]
