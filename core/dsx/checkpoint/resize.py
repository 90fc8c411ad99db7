"""States that each rank has for itself, on another number of ranks than saved them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from dsx.checkpoint.archive import Archive
from dsx.checkpoint.content import Entry, own_key
from dsx.contracts import Transport
from dsx.together import together


def read_means(entries: Sequence[Entry], path: Path, transport: Transport, device: torch.device) -> None:
    """Fill each entry with the mean of what all ranks had that wrote the checkpoint; entered by all ranks.

    Each rank reads its share of the entries, one of them and one old rank at a time, and tells the others.
    Raises the same `CheckpointError` on every rank if it fails on any.
    """
    mine = [entry for number, entry in enumerate(entries) if number % transport.world == transport.rank]
    together(transport, device, lambda: _fill(mine, path))
    for number, entry in enumerate(entries):
        assert entry.held is not None
        if entry.held.held.size:
            root = number % transport.world
            with entry.held.held.changing() as values:
                transport.broadcast(values, root, channel="admin", purpose="state").wait()


def _fill(entries: Sequence[Entry], path: Path) -> None:
    if not entries:
        return
    archive = Archive(path)
    for entry in entries:
        assert entry.held is not None
        held, world = entry.held.held, archive.info["world"]
        total = torch.zeros(held.size, dtype=torch.promote_types(held.dtype, torch.float32))
        for rank in range(world):
            for start, piece in archive.read(own_key(rank, entry.state, entry.name)):
                total[start : start + piece.numel()].add_(piece)
        with held.changing() as values:
            values.copy_(total.div_(world))
