"""Plugin `fp32`: parameters in the dtype they were built in, as without it, and gradients inspected in one read."""

from __future__ import annotations

from dsx.contracts import Dtypes
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx_precision.guard import guard

descriptor = Descriptor(
    name="fp32",
    section="precision",
    contract=1,
    fills={"dtypes": Fill(), "guard": Fill()},
    summary="parameters in the dtype they were built in, gradients inspected by one kernel",
)


@hook
def dsx_precision() -> list[Part]:
    return [Part("dtypes", lambda ctx: Dtypes()), guard()]
