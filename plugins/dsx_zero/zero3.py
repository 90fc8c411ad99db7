"""`zero3`: parameters, gradients and optimizer states of 1/N."""

from __future__ import annotations

from dsx.plugin import Context, Descriptor, Fill, Part, hook
from dsx_zero.options import GatherOptions, cut, whole_units
from dsx_zero.sharded_gradients import ShardedGradients
from dsx_zero.sharded_parameters import Gathered

descriptor = Descriptor(
    name="zero3",
    section="partition",
    contract=1,
    options=GatherOptions,
    fills={"layout": Fill(offers={"gradients.early", "parameter.sharded"})},
    summary="ZeRO stage 3: parameters, gradients and optimizer states sharded",
)


@hook
def dsx_partition(options: GatherOptions) -> list[Part]:
    def build(ctx: Context) -> Gathered:
        units = cut(ctx, options, "partition.zero3.units")
        permanent = whole_units(units, options.whole, "partition.zero3.whole")
        return Gathered(ctx, units, ShardedGradients, options.prefetch, permanent)

    return [Part("layout", build)]
