"""Where observers write, and the error where they cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from dsx.errors import DsxError

METRICS = "metrics.jsonl"
"""What `jsonl` writes and `dsx report` reads. Here, since reading needs no torch."""


@frozen(kw_only=True)
class Place:
    """Where an observer writes.

    folder  to write into; None: the run's own, which `dsx run` makes known. A script that calls `dsx.prepare` names one
            here, or nothing is written
    """

    folder: str | None = None

    @property
    def path(self) -> Path | None:
        """The folder, if it is named."""
        return None if self.folder is None else Path(self.folder)


@contextmanager
def writing(path: Path, plugin: str) -> Iterator[None]:
    """Errors of the file system within it say what was being written, and for which plugin."""
    try:
        yield
    except OSError as error:
        raise DsxError(
            f"'{plugin}' cannot write {path}",
            where=f"[observe.{plugin}]",
            found=error.strerror or str(error),
            remedy="make room there, or choose another folder with run.out",
        ) from error
