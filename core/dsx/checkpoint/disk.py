"""Names and small files that are on disk when the call returns."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsx.errors import CheckpointError


def write_synced(path: Path, text: str) -> None:
    """Write a small file and have it on disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(temporary: Path, path: Path) -> None:
    """Give a finished folder its name; what had it is renamed first and then deleted."""
    replaced = path.with_name(f".{path.name}.deleting")
    shutil.rmtree(replaced, ignore_errors=True)
    if path.exists():
        os.rename(path, replaced)
    os.rename(temporary, path)
    shutil.rmtree(replaced, ignore_errors=True)
    sync_folder(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses within is a `CheckpointError` about `path`."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"'{path}' cannot be written: {error.strerror or error}") from error
