"""Files that hold so many bytes between them, and are read and written at any block."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import finalize

from torch import Tensor

from dsx.errors import DsxError, KernelUnavailable
from dsx_kernels.aio.disks import Disk
from dsx_kernels.aio.faults import refused
from dsx_kernels.aio.home import sweep
from dsx_kernels.aio.layout import BLOCK, rounded, sizes
from dsx_kernels.aio.native import Engine, Ticket, missing


class Counts(NamedTuple):
    """What went through files: bytes as the system moved them, whole blocks, and requests of any length."""

    bytes_read: int
    bytes_written: int
    requests: int


class Files:
    """`size` bytes on disk, over the folders in turn by pieces of 1 MiB; reads and writes run at the same time.

    folders    one or several, best on a disk each; made if their parent is there
    size       bytes in all, rounded up to a multiple of 4,096; the disk's space is taken at once
    direct     past the page cache (O_DIRECT); where the filesystem refuses that, through it, which is logged once
    threads    for each folder
    checksums  keep one of every 4,096 bytes that are written, 8 bytes of memory each, and compare as they are read
    path       `paths` are the files

    Each instance has a directory of its own in each folder, removed by `close`, when nobody refers to it any more, or
    at exit; those of processes that were killed are removed when the next instance is made there.
    `DsxError` if a folder is not there, is full, or takes no files; `KernelUnavailable` without the native library.
    """

    def __init__(
        self,
        folders: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        size: int,
        *,
        direct: bool = True,
        threads: int = 16,
        checksums: bool = False,
    ) -> None:
        if reason := missing():
            raise KernelUnavailable(f"no files can be read and written by threads here: {reason}")
        if size < 0 or threads < 1:
            raise ValueError(f"Files: {size} bytes, {threads} threads")
        self.size = rounded(size)
        self.folders = _folders(folders)
        disks = _disks(self.folders, self.size, direct)
        self.paths = tuple(disk.path for disk in disks)
        self.direct = tuple(disk.direct for disk in disks)
        descriptors = [disk.descriptor for disk in disks]
        try:
            self._engine = Engine(self.paths, descriptors, self.direct, self.size, threads, checksums)
        except BaseException:
            _discard(disks)
            raise
        self._disks = disks
        finalize(self, _close, self._engine, disks)

    def read(self, offset: int, tensor: Tensor) -> Ticket:
        """Start to fill a tensor with the bytes from `offset` on.

        offset   a multiple of 4,096
        tensor   1-D, contiguous, on the CPU, of any dtype and length; best from `aligned`: other memory is copied
        returns  at once, unless 1,024 requests are not done yet; what is asked for before it is done is not ordered
        """
        return self._engine.submit(False, self._checked(offset, tensor), offset)

    def write(self, offset: int, tensor: Tensor) -> Ticket:
        """Start to write a tensor to the bytes from `offset` on; it must not change before that is done.

        As `read`. After a length that is no multiple of 4,096, the rest of the last block is zero.
        """
        return self._engine.submit(True, self._checked(offset, tensor), offset)

    def sync(self) -> None:
        """Wait for all that was asked for, then for the disks. `DsxError` of a request that nobody waited for."""
        self._engine.settle()
        self._engine.flush()

    @property
    def counts(self) -> Counts:
        """What went through so far."""
        return Counts(*self._engine.counts())

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, and remove the files; may be called twice."""
        _close(self._engine, self._disks)

    def _checked(self, offset: int, tensor: Tensor) -> Tensor:
        nbytes = tensor.numel() * tensor.element_size()
        if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(
                f"files take 1-D contiguous tensors on the CPU, not {list(tensor.shape)} with strides "
                f"{tensor.stride()} on {tensor.device}"
            )
        if offset % BLOCK or offset < 0 or offset + nbytes > self.size:
            raise ValueError(
                f"files of {self.size:,} bytes have no {nbytes:,} bytes from byte {offset:,} on, or that is no "
                f"multiple of {BLOCK:,}"
            )
        return tensor


def free(folders: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> int:
    """Bytes that `Files` could take in folders, which may not be there yet.

    What processes that are dead left in them is removed first, as `Files` would. `DsxError` if one cannot be read.
    """
    several = _folders(folders)
    for folder in filter(Path.is_dir, several):
        try:
            sweep(folder)
        except OSError as error:
            raise refused(folder, error) from error
    there = [next(path for path in (folder, *folder.parents) if path.exists()) for folder in several]
    return len(several) * min(shutil.disk_usage(path).free for path in there)


def _folders(named: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Folders as absolute paths, each once."""
    several = (named,) if isinstance(named, (str, os.PathLike)) else named
    folders = tuple(Path(folder).resolve() for folder in several)
    if not folders:
        raise ValueError("Files: no folder is named")
    for folder in folders:
        if folders.count(folder) > 1:
            raise DsxError("a folder for offload files is named twice", where=str(folder), remedy="name it once")
    return folders


def _disks(folders: Sequence[Path], size: int, direct: bool) -> list[Disk]:
    disks: list[Disk] = []
    try:
        for folder, share in zip(folders, sizes(size, len(folders)), strict=True):
            disks.append(Disk(folder, share, direct=direct))
    except BaseException:
        _discard(disks)
        raise
    return disks


def _discard(disks: Iterable[Disk]) -> None:
    for disk in disks:
        disk.discard()


def _close(engine: Engine, disks: Iterable[Disk]) -> None:
    """Ends the threads first: the files are theirs until then."""
    engine.close()
    for disk in disks:
        disk.home.remove()
