"""What the rules have in common: Adam's own step, a gradient into a momentum, and room to work in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsx.contracts import Hyper, Job, Piece
from dsx_kernels.adamw import adamw
from dsx_kernels.momentum import momentum

GROUP = 1024
"""Blocks are multiples of it: how signs lie in words."""


def check_block(block: int) -> None:
    """Raise `ValueError` for a block of elements that signs cannot have one scale for."""
    if block % GROUP:
        raise ValueError(f"block = {block} is no multiple of {GROUP}: take {-(-block // GROUP) * GROUP}")


def separate(states: Mapping[str, Tensor]) -> bool:
    """Whether the live parameter is another tensor than the weights."""
    return states["param"].data_ptr() != states["master"].data_ptr()


def adam_step(piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
    """AdamW's update of a piece, with the moments `exp_avg` and `exp_avg_sq`."""
    copied = separate(states)
    for run in piece.runs(job):
        adamw(
            states["grad"][run.where],
            states["master"][run.where],
            states["exp_avg"][run.where],
            states["exp_avg_sq"][run.where],
            None,
            states["param"][run.where] if copied else None,
            lr=run.hyper.lr,
            betas=run.hyper.betas,
            eps=run.hyper.eps,
            weight_decay=run.hyper.weight_decay,
            step=run.step,
            multiplier=job.multiplier,
            clip_value=run.hyper.get("clip_value"),
        )


def share_of(hyper: Hyper, job: Job, ratio: float = 1.0) -> Mapping[str, Any]:
    """How a gradient is added to a momentum, times a ratio above 0, after it is clipped: numbers of `momentum`."""
    limit = hyper.get("clip_value")
    return {
        "beta": hyper.betas[0],
        "multiplier": job.multiplier * ratio,
        "clip_value": None if limit is None else limit * ratio,
    }


def add_gradient(
    piece: Piece,
    gradient: Tensor,
    mean: Tensor,
    factor: Tensor | None,
    job: Job,
    ratios: Sequence[float] | None = None,
) -> None:
    """A gradient's share in a momentum, each element times its factor, and each parameter's times its ratio."""
    each = {segment.index: ratio for segment, ratio in zip(piece.shard.flat.segments, ratios or (), strict=False)}
    for run in piece.runs(job, merge=not ratios):
        momentum(
            mean[run.where],
            gradient[run.where],
            None if factor is None else factor[run.where],
            **share_of(run.hyper, job, each.get(run.index, 1.0)),
        )


class Rooms:
    """Memory that is used again in each update: fresh pages would cost more than what is done in them."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    @contextmanager
    def lent(self, tensor: Tensor) -> Iterator[Tensor]:
        """[as long], on its device and in its dtype, with anything in it."""
        size, kind = tensor.numel(), (tensor.dtype, tensor.device)
        fits = [room for room in self._free if room.numel() >= size and (room.dtype, room.device) == kind]
        room = min(fits, key=torch.numel, default=None)
        self._free = [other for other in self._free if other is not room]
        if room is None:
            room = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
        try:
            yield room[:size]
        finally:
            self._free.append(room)
