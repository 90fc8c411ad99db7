"""One file in a folder: its directory, its space, and the way past the page cache."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
from pathlib import Path

from dsx_kernels.aio.faults import refused
from dsx_kernels.aio.home import IN_MEMORY, Home, kind, sweep
from dsx_kernels.aio.layout import BLOCK, PIECE

_CLOSED = getattr(os, "O_CLOEXEC", 0)
_DIRECT = getattr(os, "O_DIRECT", 0)

_log = logging.getLogger("dsx.kernels")
_told: set[Path] = set()


class Disk:
    """An open file of `size` bytes in a directory of its own in a folder.

    direct  whether the page cache is passed by; wanted, it is refused by some filesystems, which is logged once
    """

    def __init__(self, folder: Path, size: int, *, direct: bool) -> None:
        """`DsxError` if the folder takes no file, or none so large."""
        try:
            folder.mkdir(exist_ok=True)
            sweep(folder)
            self.home = Home(folder)
        except OSError as error:
            raise refused(folder, error) from error
        try:
            _reserve(self.home.data, size, folder)
            self.descriptor, self.direct = _open(self.home.data, size, folder, direct)
        except BaseException:
            self.home.remove()
            raise

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.home.data

    def discard(self) -> None:
        """Close the file and remove it."""
        os.close(self.descriptor)
        self.home.remove()


def _reserve(path: Path, size: int, folder: Path) -> None:
    """Make a file whose space is taken on the disk."""
    free = shutil.disk_usage(folder).free
    try:
        if size > free:  # some filesystems would first give all there is, to the loss of others
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        # not a direct descriptor: where the filesystem cannot reserve, the C library writes a byte into each block
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _CLOSED, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                if size:
                    os.posix_fallocate(file, 0, size)
            else:
                _fill(file, size)
        finally:
            os.close(file)
    except OSError as error:
        raise refused(folder, error, wanted=size, free=free) from error


def _fill(file: int, size: int) -> None:
    """Take space by writing zeros."""
    zeros = memoryview(bytes(PIECE))
    while size > 0:
        size -= os.write(file, zeros[:size])


def _open(path: Path, size: int, folder: Path, direct: bool) -> tuple[int, bool]:
    """A descriptor of the file, and whether it is a direct one."""
    reason = None
    if direct:
        reason = _why_not_direct(path, size)
        if reason is None:
            return os.open(path, os.O_RDWR | _CLOSED | _DIRECT), True
        if folder not in _told:
            _told.add(folder)
            _log.warning("%s: %s", folder, reason)
    return os.open(path, os.O_RDWR | _CLOSED), False


def _why_not_direct(path: Path, size: int) -> str | None:
    """Why a file is not to be read and written directly; None if it can be."""
    filesystem = kind(path)
    if filesystem in IN_MEMORY:
        return f"is held in memory ({filesystem}): what is put there saves none; name a folder on a disk"
    refusal = "the filesystem refuses direct I/O; files are read and written through the page cache, more slowly"
    if not _DIRECT:
        return refusal
    try:
        file = os.open(path, os.O_RDWR | _CLOSED | _DIRECT)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return refusal
        raise
    try:
        with mmap.mmap(-1, BLOCK) as block:
            if size:
                os.pwrite(file, block, 0)
                os.preadv(file, [block], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return refusal
        raise
    finally:
        os.close(file)
    return None
