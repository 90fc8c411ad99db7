"""Token ids on disk: one flat file per corpus and tokenizer, made once however many processes start together."""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dsx.errors import DsxError
from dsx_text.tokenize import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

PREFIX = "dsx-tokens-"
"""Begins the name of every file here, so that a cache inside a data folder is not taken for data."""

_FORMAT = 1  # raise it when the same files and tokenizer come to mean other tokens
_PIECE = 1 << 20  # bytes read at a time; a piece then runs on to the end of its line, by at most as much again
_PATIENCE = 600.0  # seconds to wait for another process's build before making a copy of one's own
_LEFTOVER = 86400.0  # seconds after which a partial file belongs to nobody: its build was killed

_log = logging.getLogger(__name__)


def cached_tokens(paths: Sequence[Path], tokenizer: Tokenizer, folder: Path, limit: int | None = None) -> Path:
    """The file of the tokens of `paths` laid end to end, from `folder` if it has them and no file changed since.

    The file is flat; the suffix of its name is its dtype, the smallest unsigned one that holds `tokenizer.vocab`. The
    name is `PREFIX` and a digest of the paths, sizes and times of change, of the tokenizer and of `limit`, the bytes
    read at most. It appears under that name only when whole. A `folder` that cannot be written is replaced by a private
    one, with a warning. Raises `DsxError` for a file that cannot be read, or if neither folder can be written.
    """
    name = f"{PREFIX}{_digest(paths, tokenizer, limit)}.{token_dtype(tokenizer.vocab).name}"

    def write(target: Path) -> None:
        _write(target, tokenizer.encode(_pieces(paths, limit)), token_dtype(tokenizer.vocab))

    try:
        return _made(folder / name, write)
    except OSError as error:
        _log.warning("the token cache %s cannot be written (%s): tokens are kept for this process alone", folder, error)
    try:
        return _made(_private_folder() / name, write)
    except OSError as error:
        raise DsxError(
            "the tokens of the data cannot be written",
            where=f"{folder}, then {tempfile.gettempdir()}",
            found=str(error),
            remedy="set cache in [data] to a folder with room",
        ) from error


def token_dtype(vocab: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest unsigned dtype that holds every id below `vocab`."""
    return np.dtype(np.uint8 if vocab <= 1 << 8 else np.uint16 if vocab <= 1 << 16 else np.uint32)


def _digest(paths: Sequence[Path], tokenizer: Tokenizer, limit: int | None) -> str:
    sources = []
    for path in paths:
        with _reading(path):
            stat = path.stat()
        sources.append((str(path), stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(json.dumps((_FORMAT, tokenizer.identity, limit, sources)).encode()).hexdigest()[:32]


def _pieces(paths: Sequence[Path], limit: int | None) -> Iterator[bytes]:
    """The bytes of all files, cut at ends of lines where they have any."""
    left = limit
    for path in paths:
        with _reading(path), path.open("rb") as file:
            while piece := file.read(_PIECE) + file.readline(_PIECE):
                yield piece[:left]
                if left is not None:
                    left -= min(left, len(piece))
                    if not left:
                        return


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A file of the data that cannot be read is the user's to mend, unlike a cache that cannot be written."""
    try:
        yield
    except OSError as error:
        raise DsxError(
            "a file of the data cannot be read",
            where=str(path),
            found=str(error),
            remedy="make it readable, or leave it out of files in [data]",
        ) from error


def _made(target: Path, write: Callable[[Path], None]) -> Path:
    """`target`, written unless it is there; of the processes that ask at once, one writes and the others wait."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with _turn(target):
            if not target.exists():
                write(target)
    return target


@contextmanager
def _turn(target: Path) -> Iterator[None]:
    """Hold the build of `target`, or give up waiting: builds never disturb each other, waiting only saves work.

    The system drops the lock of a process that dies, so none can be stale; on a file system without locks, and beside
    a process that hangs, each builds its own.
    """
    lock = target.with_suffix(".lock")
    file = os.open(lock, os.O_CREAT | os.O_RDWR, 0o666)
    try:
        deadline = time.monotonic() + _PATIENCE
        while not _locked(file) and not target.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield
        with suppress(OSError):
            lock.unlink()
    finally:
        os.close(file)


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _write(target: Path, arrays: Iterable[NDArray[Any]], dtype: np.dtype[Any]) -> None:
    """Write under a name of its own, then rename: a reader never sees a part, not even after a power cut."""
    _sweep(target)
    partial = target.with_name(f"{target.stem}-{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as file:
            for ids in arrays:
                file.write(ids.astype(dtype, copy=False).data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _sweep(target: Path) -> None:
    """Remove what killed builds of the same tokens left."""
    for partial in target.parent.glob(f"{target.stem}-*.partial"):
        with suppress(OSError):
            if time.time() - partial.stat().st_mtime > _LEFTOVER:
                partial.unlink()


@functools.cache
def _private_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="dsx-tokens-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
