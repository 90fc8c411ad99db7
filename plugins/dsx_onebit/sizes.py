"""After the freeze the variance keeps its shape, and its size follows the gradients of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from dsx.contracts import Flat, Job, State, Transport
from dsx_kernels.squares import squares
from dsx_onebit.freeze import window

STATES = tuple(State(name, dtype=torch.float64, shape="segment") for name in ("size", "first_size", "looks"))
"""Mean square of each parameter's gradient over a window of the variance; the same when the first window after the
freeze was full; in how many updates it was looked at."""

LIMIT = 5.0
"""How far a factor may move."""


def ratios(flat: Flat, states: Mapping[str, Tensor], job: Job) -> Sequence[float]:
    """What the factors of each parameter of a flat one are to be multiplied by: by how much the root of its gradient's
    mean square has fallen since the first window after the freeze, as of the update before; 1 within that window."""
    size, first = states["size"] / (1 - _decays(flat, states, job) ** states["looks"]), states["first_size"]
    known = (first > 0) & (size > 0)
    ratio = torch.where(known, (first / size).sqrt().clamp(1 / LIMIT, LIMIT), 1.0)
    if ratio.is_meta:  # a plan's rehearsal has no numbers
        return [1.0] * len(ratio)
    made: list[float] = ratio.tolist()
    return made


def look(
    flat: Flat, gradient: Tensor, states: Mapping[str, Tensor], job: Job, transport: Transport
) -> Callable[[], None]:
    """Begin to tell all ranks how large this one's gradient is; what is returned ends that, and remembers the mean.

    gradient  [size]
    """
    now = torch.zeros_like(states["size"])
    for number, segment in enumerate(flat.segments):
        if segment.start < segment.stop and job.used[segment.index]:
            now[number] = squares(gradient[segment.start : segment.stop])
            now[number] *= job.multiplier**2 / (segment.stop - segment.start)
    handle = transport.all_reduce(now, "mean", channel="rule", purpose="rule")

    def remember() -> None:
        handle.wait()
        size, first, looks, two = states["size"], states["first_size"], states["looks"], _decays(flat, states, job)
        used = torch.tensor([job.used[segment.index] for segment in flat.segments], device=looks.device)
        windows = [window(job.hypers[segment.group].betas[1]) for segment in flat.segments]
        looks.add_(used)
        size.copy_(torch.where(used, two * size + (1 - two) * now, size))
        full = used & (looks == torch.tensor(windows, device=looks.device))
        first.copy_(torch.where(full, size / (1 - two**looks), first))

    return remember


def _decays(flat: Flat, states: Mapping[str, Tensor], job: Job) -> Tensor:
    """[parameters of the flat one]."""
    decays = [job.hypers[segment.group].betas[1] for segment in flat.segments]
    return torch.tensor(decays, dtype=torch.float64, device=states["size"].device)
