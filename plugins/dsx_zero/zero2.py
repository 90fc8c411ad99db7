"""`zero2`: parameters whole, gradients and optimizer states of 1/N."""

from __future__ import annotations

from dsx.plugin import Descriptor, Fill, Part, hook
from dsx_zero.options import Options, cut
from dsx_zero.sharded_gradients import ShardedGradients
from dsx_zero.whole_parameters import Published

descriptor = Descriptor(
    name="zero2",
    section="partition",
    contract=1,
    options=Options,
    fills={"layout": Fill(offers={"gradients.early", "parameter.whole"})},
    summary="ZeRO stage 2: optimizer states and gradients sharded",
)


@hook
def dsx_partition(options: Options) -> list[Part]:
    where = "partition.zero2.units"
    return [Part("layout", lambda ctx: Published(ctx, cut(ctx, options, where), ShardedGradients))]
