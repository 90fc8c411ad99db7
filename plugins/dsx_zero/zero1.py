"""`zero1`: parameters whole, gradients whole until the last micro-batch, optimizer states of 1/N."""

from __future__ import annotations

from dsx.plugin import Descriptor, Fill, Part, hook
from dsx_zero.options import Options, cut
from dsx_zero.whole_gradients import WholeGradients
from dsx_zero.whole_parameters import Published

descriptor = Descriptor(
    name="zero1",
    section="partition",
    contract=1,
    options=Options,
    fills={"layout": Fill(offers={"gradients.early", "gradients.local", "parameter.whole"})},
    summary="ZeRO stage 1: optimizer states sharded",
)


@hook
def dsx_partition(options: Options) -> list[Part]:
    where = "partition.zero1.units"
    return [Part("layout", lambda ctx: Published(ctx, cut(ctx, options, where), WholeGradients))]
