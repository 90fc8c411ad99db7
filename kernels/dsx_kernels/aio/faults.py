"""What went wrong with a file, in the user's words."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from dsx.errors import DsxError
from dsx_kernels.aio.layout import place

SHORT, CHECKSUM = -1, -2
"""As `fault` of native.cpp."""

_REMEDIES = {
    errno.ENOSPC: "free space there, or name a folder on another disk",
    errno.EDQUOT: "free some of your quota there, or name a folder on another disk",
    errno.EIO: "the disk or its connection fails: see the system's log (dmesg), or name a folder on another disk",
    errno.EFBIG: "lift the limit on the size of files (ulimit -f), or name more folders",
}


def fault(paths: Sequence[Path], write: bool, error: int, offset: int) -> DsxError:
    """The error for a transfer that failed with `error` at byte `offset` of all."""
    number, byte = place(offset, len(paths))
    where = f"{paths[number]}, byte {byte:,}"
    if error == SHORT:
        return DsxError(
            "an offload file ends too early",
            where=where,
            remedy="something cut it while it was in use: keep other programs away from it",
        )
    if error == CHECKSUM:
        return DsxError(
            "an offload file does not hold what was written",
            where=where,
            expected="the checksum that the 4,096 bytes from there had when they were written",
            found="another one",
            remedy="the disk, its connection or another program changed them: name a folder on another disk",
        )
    if error == errno.ECANCELED:
        return DsxError("offload files were closed before all was read and written", where=where)
    verb = "written" if write else "read"
    return DsxError(f"an offload file cannot be {verb}: {os.strerror(error)}", where=where, remedy=_remedy(error))


def refused(folder: Path, error: OSError, *, wanted: int | None = None, free: int | None = None) -> DsxError:
    """The error for a folder in which no file can be made, or none of `wanted` bytes."""
    size = "" if wanted is None else f" of {_bytes(wanted)}"
    return DsxError(
        f"no offload file{size} can be made in {folder}: {error.strerror}",
        where=str(folder),
        expected=None if wanted is None else f"{_bytes(wanted)} free",
        found=None if free is None else f"{_bytes(free)} free",
        remedy=_remedy(error.errno) or "name a folder that can be written to; its parent must exist",
    )


def _remedy(error: int | None) -> str | None:
    return None if error is None else _REMEDIES.get(error)


def _bytes(count: int) -> str:
    return f"{count:,} bytes"
