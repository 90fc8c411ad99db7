"""Plugin `cpu_offload`: states rest in the host's memory (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840)."""

from __future__ import annotations

from typing import Annotated, Literal

from attrs import frozen

from dsx.plugin import Context, Descriptor, Fill, Part, hook, positive
from dsx_offload.claims import Claims
from dsx_offload.host import HostTier

State = Literal["optimizer", "grad", "param"]


@frozen(kw_only=True)
class Options:
    """`[partition.cpu_offload]`.

    states       what rests there: "optimizer" (masters and the rule's states), "grad" (where the layout shards them),
                 "param" (where the layout shards them)
    limit_bytes  the most that a rank puts there; what is beyond it goes to the next tier of `use`, in the end to the
                 device. None: no limit
    update       where the optimizer runs: "host", on the states as they lie, gradients being brought there and new
                 parameters back; "device", states being brought there and back
    piece_bytes  of a state, that are copied to or from a device at a time
    """

    states: tuple[State, ...] = ("optimizer",)
    limit_bytes: Annotated[int, positive] | None = None
    update: Literal["host", "device"] = "host"
    piece_bytes: Annotated[int, positive] = 4 << 20


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
        claims = Claims(options.states, options.limit_bytes)
        return HostTier(claims, ctx.plan.device, update=options.update, piece_bytes=options.piece_bytes)

    return [Part("tiers", build)]
