"""The checkpoints of a run: `latest` moves last, the last few are kept, and what a crash left is swept."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from dsx.checkpoint.disk import sync_folder, write_synced
from dsx.checkpoint.info import INFO, read_info
from dsx.errors import CheckpointError

LATEST, ORIGIN = "latest", "began-from"
_NAME = re.compile(r"step-(\d+)")


class Series:
    """The folder of a run's checkpoints. Only one rank may write to it; any may read.

    keep  how many of the newest are kept
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder, self.keep = folder, keep

    def path(self, step: int) -> Path:
        """Where the checkpoint after `step` updates goes."""
        return self.folder / f"step-{step:08d}"

    def exists(self) -> bool:
        """Whether the run has a checkpoint."""
        return (self.folder / LATEST).exists()

    def find(self, which: str = LATEST) -> Path:
        """The folder of `latest`, of a name in this series, or of any path. Raises `CheckpointError` if it is not
        there."""
        if which != LATEST:
            inside = self.folder / which
            return inside if _NAME.fullmatch(which) and inside.exists() else Path(which)
        try:
            name = (self.folder / LATEST).read_text("utf-8").strip()
        except OSError:
            raise CheckpointError(
                f"there is no checkpoint to resume from in '{self.folder}'",
                expected=f"a file '{LATEST}' in it",
                remedy="run without --resume, or give --resume the path of a checkpoint",
            ) from None
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"'{self.folder / LATEST}' names no checkpoint", found=repr(name[:80]))
        return self.folder / name

    def begin(self, origin: str | None) -> None:
        """A run begins, from `origin`, which need not be the latest checkpoint here; until it has one of its own."""
        try:
            if origin is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                write_synced(self.folder / ORIGIN, f"{origin}\n")
            else:
                (self.folder / ORIGIN).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"'{self.folder / ORIGIN}' cannot be written: {error.strerror}") from error

    def origin(self) -> str | None:
        """What the run began from, if it has written no checkpoint since."""
        try:
            return (self.folder / ORIGIN).read_text("utf-8").strip()
        except OSError:
            return None

    def record(self, path: Path) -> None:
        """`path` is written whole: make it the latest, and delete what is older than the last few."""
        temporary = self.folder / f"{LATEST}.tmp"
        try:
            write_synced(temporary, f"{path.name}\n")
            os.replace(temporary, self.folder / LATEST)
            (self.folder / ORIGIN).unlink(missing_ok=True)
            sync_folder(self.folder)
        except OSError as error:
            raise CheckpointError(f"'{self.folder / LATEST}' cannot be written: {error.strerror}") from error
        others = [other for other in self.newest_first() if other != path]
        for old in others[max(0, self.keep - 1) :]:
            self._delete(old)

    def newest_first(self) -> list[Path]:
        """Whole checkpoints by the time they were written, the newest first; damaged ones last."""
        found = [path for path in self.folder.glob("step-*") if _NAME.fullmatch(path.name) and (path / INFO).exists()]
        return sorted(found, key=_written, reverse=True)

    def sweep(self) -> None:
        """Remove what a crash left: temporary folders, and deletions that were not finished."""
        for left in (*self.folder.glob("step-*.tmp"), *self.folder.glob(".step-*.deleting")):
            shutil.rmtree(left, ignore_errors=True)
        with contextlib.suppress(OSError):
            (self.folder / f"{LATEST}.tmp").unlink()

    def clear(self) -> None:
        """Delete every checkpoint of the run."""
        with contextlib.suppress(OSError):
            (self.folder / LATEST).unlink()
        for path in self.newest_first():
            self._delete(path)
        self.sweep()

    def _delete(self, path: Path) -> None:
        """Renamed first: a crash in the middle must not leave half a checkpoint under its name."""
        hidden = path.with_name(f".{path.name}.deleting")
        shutil.rmtree(hidden, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def locate(path: Path) -> Path:
    """The checkpoint that is meant by its own folder, by that of a series, or by that of a run: the latest there."""
    for series in (path / "checkpoints", path):
        if (series / LATEST).exists() and not (path / INFO).exists():
            return Series(series).find()
    return path


def _written(path: Path) -> int:
    try:
        return int(read_info(path)["time_ns"])
    except CheckpointError:
        return 0
