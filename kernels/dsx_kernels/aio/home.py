"""A directory for each process and instance in a folder that others use too, and the removal of those that were left.

A directory `dsx-HOST-PID-BOOT-NUMBER` holds one file of data and one that is locked while its process lives. Where
nobody holds the lock the process is dead, if the lock is one that we can see: BOOT, the system's number of its last
start, is ours, or the filesystem is one that only one system mounts. Others, such as those of another host on a network
filesystem, are left alone and named in the log.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
from itertools import count
from pathlib import Path
from weakref import WeakSet

from dsx_kernels.aio.native import filesystem

DATA, LOCK = "data", "lock"
_NAME = re.compile(r"dsx-[\w.]+-\d+-([0-9a-f]{12})-\d+")
_UNKNOWN = "0" * 12

_OF_ONE_SYSTEM = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x794C7630: "overlay",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
}
IN_MEMORY = ("tmpfs", "ramfs")

_log = logging.getLogger("dsx.kernels")


class Home:
    """A new directory in a folder, with the lock held."""

    def __init__(self, folder: Path) -> None:
        """`OSError` if it cannot be made."""
        self._process = os.getpid()
        start = f"dsx-{_host()}-{self._process}-{_boot()}"
        for number in count():
            self.path = folder / f"{start}-{number}"
            lock = _take(self.path)
            if lock is not None:
                break
        self._lock: int | None = lock
        _living.add(self)

    @property
    def data(self) -> Path:
        """The file of data, for the owner to make."""
        return self.path / DATA

    def remove(self) -> None:
        """Remove the directory; a forked process leaves it alone."""
        if self._lock is not None and self._process == os.getpid():
            _remove(self.path)
            self.release()

    def release(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def kind(folder: Path) -> str | None:
    """The name of a folder's filesystem, if it is one that only one system mounts."""
    return _OF_ONE_SYSTEM.get(filesystem(folder))


def sweep(folder: Path) -> None:
    """Remove the directories that processes which are dead left in a folder."""
    visible = kind(folder) is not None
    foreign = []
    for path in sorted(folder.iterdir()):
        name = _NAME.fullmatch(path.name)
        if name is None or not path.is_dir() or path.is_symlink():
            continue
        if not visible and (name[1] != _boot() or name[1] == _UNKNOWN):
            foreign.append(path)
        elif _is_left(path):
            _log.info("removed %s, which a process that is dead left", path)
    if foreign:
        _log.warning(
            "%s: offload files of other hosts, or from before this one was started, were left alone, since nobody here "
            "can say whether they are in use: %s; if they are not, remove them",
            folder,
            ", ".join(path.name for path in foreign),
        )


def _take(path: Path) -> int | None:
    """The lock of a new directory; None if there is one already, or somebody swept it away meanwhile."""
    try:
        path.mkdir(0o700)
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except (FileExistsError, FileNotFoundError):
        if not path.parent.is_dir():
            raise
        return None
    try:
        free = _locked(lock)
    except OSError as error:
        _log.warning("%s takes no locks (%s): if this process is killed, remove that directory", path, error.strerror)
        return lock
    if free and os.fstat(lock).st_nlink:
        return lock
    os.close(lock)
    return None


def _is_left(path: Path) -> bool:
    """Whether nobody held the lock of a directory; then it is removed."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:
        return False
    try:
        # One without a name was removed by its owner, who may have made another directory of that name since.
        free = _locked(lock) and os.fstat(lock).st_nlink > 0
        if free:
            _remove(path)
    except OSError as error:
        _log.warning("%s was left alone: %s", path, error.strerror)
        return False
    finally:
        os.close(lock)
    return free


def _locked(lock: int) -> bool:
    """Whether the lock could be taken."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _remove(path: Path) -> None:
    """Remove a directory and what belongs into it, the lock last."""
    (path / DATA).unlink(missing_ok=True)
    (path / LOCK).unlink(missing_ok=True)
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            raise


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]", "_", os.uname().nodename)[:64] or "host"


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().replace("-", "")[:12]
    except OSError:
        return _UNKNOWN


_living: WeakSet[Home] = WeakSet()


def _after_fork_in_child() -> None:
    """The lock is shared with forked processes, and would be held until the last of them ends."""
    for home in tuple(_living):
        home.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
