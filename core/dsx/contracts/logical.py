"""States of a flat parameter as tensors of its parameters, whatever their shape and scope."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import evolve
from torch import Tensor

from dsx.contracts.data import Flat, Segment, State
from dsx.contracts.transport import Transport


def grid(flat: Flat, block: int) -> tuple[Segment, ...]:
    """The parameters of a flat one in blocks of `block` elements, each 1-D, its last block perhaps not full."""
    return tuple(
        evolve(segment, start=segment.start // block, stop=stop, shape=torch.Size([stop - segment.start // block]))
        for segment in flat.segments
        for stop in [-(-segment.stop // block)]
    )


def logical_state(
    flat: Flat, state: State, held: Tensor, transport: Transport, *, block: int, parted: bool
) -> Iterator[tuple[str, Tensor]]:
    """(parameter name, whole tensor) of a state; entered by all ranks, one flat parameter whole at a time.

    In the parameter's own shape; 1-D for a state of one number for each block, 0-dim for one for each parameter. Of a
    state of scope `rank`, this rank's own.

    held    what this rank has of it
    parted  whether that is 1/N, of the part of the flat parameter that belongs to the rank
    """
    whole = held
    if parted:
        whole = torch.empty(held.numel() * transport.world, dtype=held.dtype, device=held.device)
        transport.all_gather(whole, held.contiguous(), channel="admin", purpose="state").wait()
    if state.shape == "segment":
        rows, each = whole.view(-1, len(flat.segments)), flat.size // transport.world
        for number, segment in enumerate(flat.segments):  # all have all numbers; whoever has the parameter is right
            owner = min(segment.start // each, len(rows) - 1) if parted else 0
            yield segment.name, rows[owner, number]
    else:
        for segment in grid(flat, block) if state.shape == "block" else flat.segments:
            yield segment.name, segment.view(whole)
