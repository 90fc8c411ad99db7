"""Plugin `cpu_offload`: states rest in the host's memory (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840)."""

from __future__ import annotations

from attrs import frozen

from dsx.plugin import Context, Descriptor, Fill, Part, hook
from dsx_offload.claims import Claims, TierOptions
from dsx_offload.host import HostTier


@frozen(kw_only=True)
class Options(TierOptions):
    """`[partition.cpu_offload]`.

    states       what rests there: "optimizer" (masters and the rule's states), "grad" (where the layout shards them),
                 "param" (where the layout shards them)
    limit_bytes  the most that a rank puts there; what is beyond it goes to the next tier of `use`, in the end to the
                 device. None: no limit
    update       where the optimizer runs: "host", on the states as they lie, gradients being brought there and new
                 parameters back; "device", states being brought there and back
    piece_bytes  of a state, that are copied to or from a device at a time
    """


descriptor = Descriptor(
    name="cpu_offload",
    section="partition",
    contract=1,
    options=Options,
    fills={"tiers": Fill()},
    summary="states in the host's memory",
)


@hook
def dsx_partition(options: Options) -> list[Part]:
    def build(ctx: Context) -> HostTier:
        claims = Claims(options)
        return HostTier(claims, ctx.plan.device, update=options.update, piece_bytes=options.piece_bytes)

    return [Part("tiers", build)]
