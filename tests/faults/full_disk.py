"""Fills a small disk during saves: every rank must fail alike, `latest` must not move, nothing temporary may be left.

python tests/faults/full_disk.py [--nproc 2]     (root: it mounts a tmpfs of its own)
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import dsx
from dsx.checkpoint.series import Series
from dsx.errors import CheckpointError
from dsx.testing import Ranks
from dsx.testing.models import Tangle, tokens

SIZE = 3 << 20


@contextmanager
def small_disk(size: int) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", name], capture_output=True, text=True, check=False
        )
        if mounted.returncode:
            print(f"skipped: a tmpfs cannot be mounted here: {mounted.stderr.strip()}")
            sys.exit(0)
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", name], check=True)


def fill(folder: str) -> tuple[list[int], str, str | None]:
    """Save after every update until the disk is full: the updates saved, the error, what `latest` names."""
    torch.manual_seed(0)
    engine, series = dsx.prepare(Tangle(width=64)), Series(Path(folder), keep=10_000)
    saved: list[int] = []
    rank = torch.distributed.get_rank()
    for step in range(100):
        engine.train_step([tokens(step, 0, rank)])
        try:
            engine.save(series.path(step))
        except CheckpointError as error:
            return saved, str(error), series.find().name if saved else None
        if rank == 0:
            series.record(series.path(step))
        torch.distributed.barrier()
        saved.append(step)
    raise AssertionError("the disk did not become full")


def reload(folder: str) -> int:
    engine = dsx.prepare(Tangle(width=64))
    engine.load(Series(Path(folder)).find())
    return engine.steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    choices = parser.parse_args()
    with small_disk(SIZE) as folder, Ranks(choices.nproc) as ranks:
        found = ranks.run(fill, str(folder), world=choices.nproc)
        saved, error, latest = found[0]
        assert all(result == found[0] for result in found), found
        assert "No space left on device" in error, error
        assert latest == f"step-{saved[-1]:08d}", (latest, saved)
        left = sorted(path.name for path in folder.iterdir())
        assert left == ["latest", *(f"step-{step:08d}" for step in saved)], left
        assert ranks.run(reload, str(folder), world=1) == [saved[-1] + 1]
    print(f"{len(saved)} checkpoints, then on every rank:\n{error}\nlatest still names {latest}, and it loads")


if __name__ == "__main__":
    import full_disk  # ranks import functions by the name of their module

    full_disk.main()
