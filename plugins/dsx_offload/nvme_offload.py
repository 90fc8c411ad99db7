"""Plugin `nvme_offload`: states rest in files (Rajbhandari et al. 2021, ZeRO-Infinity, arXiv 2104.07857)."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from attrs import frozen

from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Part, hook, positive
from dsx_kernels.aio import Files, free, missing
from dsx_offload.claims import Claims, TierOptions
from dsx_offload.disk import FileTier


@frozen(kw_only=True)
class Options(TierOptions):
    """`[partition.nvme_offload]`.

    path         folder on a disk, or several, one on each disk, over which states are spread
    states       what rests there: "optimizer" (masters and the rule's states), "grad" (where the layout shards them),
                 "param" (where the layout shards them)
    limit_bytes  the most that a rank puts there; what is beyond it goes to the next tier of `use`, in the end to the
                 device. None: no limit
    update       where the optimizer runs: "host", gradients being brought there and new parameters back; "device"
    piece_bytes  of a state, that are read or written at a time
    threads      for each folder
    direct       past the page cache, where the filesystem can; false: through it
    checksums    compare what is read with what was written; 8 bytes of memory for 4,096 of states
    """

    path: str | tuple[str, ...]
    piece_bytes: Annotated[int, positive] = 2 << 20
    threads: Annotated[int, positive] = 16
    direct: bool = True
    checksums: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        """As a list."""
        return (self.path,) if isinstance(self.path, str) else self.path


descriptor = Descriptor(
    name="nvme_offload",
    section="partition",
    contract=1,
    options=Options,
    fills={"tiers": Fill()},
    summary="states in files on a disk",
)


@hook
def dsx_partition(options: Options) -> list[Part]:
    return [Part("tiers", lambda ctx: _build(options, ctx))]


def _build(options: Options, ctx: Context) -> FileTier:
    if (why := missing()) is not None:
        raise DsxError("'nvme_offload' cannot read and write files", where="[partition.nvme_offload]", found=why)
    if not options.paths or not all(options.paths):
        raise DsxError("'nvme_offload' has no folder", where="partition.nvme_offload.path", remedy="name one on a disk")
    open_files = partial(
        Files, options.paths, threads=options.threads, direct=options.direct, checksums=options.checksums
    )
    return FileTier(
        Claims(options),
        ctx.plan.device,
        open_files=open_files,
        room=partial(free, options.paths),
        update=options.update,
        piece_bytes=options.piece_bytes,
    )
