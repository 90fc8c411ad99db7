"""1-bit updates where a rank updates 1/N only (ZeRO stage 1): what its owner changes travels as signs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dsx.contracts import Job, Piece, Run, State, Transport
from dsx_kernels.accumulate import accumulate
from dsx_onebit.exchange import Exchange, Share

STATES = (
    State("own_momentum", scope="rank", resize="mean"),
    State("factor", scope="rank", resize="mean"),
    State("weight_error", scope="chunk"),
)
"""In place of `owner_error`. The first two a rank must have whole to compress its own gradient: 8 bytes a parameter
that the stage does not save. The last is what everybody's parameter lacks of the owner's weight."""


def gather(states: Mapping[str, Tensor], transport: Transport) -> None:
    """After the freeze every rank needs all of what each owner made of its part's moments."""
    for whole, part in (("own_momentum", "exp_avg"), ("factor", "exp_avg_sq")):
        transport.all_gather(states[whole], states[part], channel="rule", purpose="rule").wait()


def runs(whole: Piece, own: slice, job: Job) -> Iterator[tuple[Run, slice]]:
    """The runs of a flat parameter that meet the part which this rank owns, and where in that part they do."""
    for run in whole.runs(job):
        low, high = max(run.where.start, own.start) - own.start, min(run.where.stop, own.stop) - own.start
        if low < high:
            yield run, slice(low, high)


def change(
    whole: Piece,
    own: slice,
    states: Mapping[str, Tensor],
    job: Job,
    counts: Tensor,
    exchange: Exchange,
    step: Tensor | None,
) -> Iterator[None]:
    """Bring what changes of the part that this rank owns, and of all parts, to every rank's live parameter.

    whole   the flat parameter
    own     where in it this rank's part lies
    step    [size / N], what is to be added to the live weights; None: the owner's are others, and it has changed them,
            both in `master` and in `weight_error`

    What travels is the difference between an owner's weights and what everybody has; the signs' error and the rounding
    of a 16-bit parameter are both in what is left of it.
    """
    live, left, gradient = states["param"], states["weight_error"], states["grad"]
    negative = None
    if step is None:
        negative = Share(live[own], None, [(slice(0, left.numel()), {"beta": 0.0, "multiplier": -1.0})])
    yield from exchange.spread(step, left, counts, out=gradient, share=negative)
    for run in whole.runs(job):
        accumulate(live[run.where], gradient[run.where])
    if step is None:
        torch.sub(states["master"], live[own], out=left)


def weights(states: Mapping[str, Tensor], own: slice) -> tuple[Tensor, bool]:
    """The weights of the part that this rank owns, and whether they are others than the live ones."""
    master, live = states["master"], states["param"]
    separate = master.data_ptr() != live.data_ptr()
    return (master if separate else live[own]), separate
