"""Plugin `constant`: every update has the optimizer's own learning rate, as in a run that names no schedule."""

from __future__ import annotations

from dsx.contracts import Schedule
from dsx.plugin import Descriptor, Fill, Part, hook

descriptor = Descriptor(
    name="constant",
    section="optimize",
    contract=1,
    fills={"schedule": Fill()},
    summary="the optimizer's own learning rate throughout",
)


@hook
def dsx_optimize() -> list[Part]:
    return [Part("schedule", lambda ctx: Schedule())]
