"""When the variance is frozen, and what becomes of the moments then."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsx.contracts import Flat, Hyper, Job, Piece, Transport

STABLE = 0.96
"""Of the variance's L1 norm, what it must have been a window earlier to count as settled (Tang et al. 2021, §7.1)."""


def window(beta2: float) -> int:
    """Updates over which the variance forgets: 1 / (1 - beta2)."""
    return max(1, round(1 / (1 - beta2)))


def expected(beta2: float) -> int:
    """The update at which the variance of gradients that do not change in size passes for settled.

    Raw, it is 1 - beta2^t of its limit; the ratio over a window reaches `STABLE` at 378 for beta2 0.99, at 3,783 for
    0.999.
    """
    if beta2 == 0:
        return 1
    growth = beta2 ** -window(beta2)
    return math.ceil(math.log((1 - STABLE) / (growth - STABLE)) / math.log(beta2))


class Freeze:
    """Decides, the same on all ranks, after which update only signs travel.

    fixed  the update; None: when the L1 norm of the variance was `STABLE` of the present one a window ago. It is the
           raw variance: one whose bias is corrected is stable long before it has seen enough. Not before `expected`:
           one that is forgetting large first gradients was larger at any time
    at     the update at which it was frozen, None before
    """

    def __init__(self, fixed: int | None, beta2: float) -> None:
        self._fixed, self._window, self._soonest = fixed, window(beta2), expected(beta2)
        self._norms: deque[float] = deque(maxlen=self._window + 1)
        self._parts: list[Tensor] | None = []
        self._step = 0
        self.at: int | None = None

    def compresses(self, step: int) -> bool:
        """Whether update number `step` comes after the freeze; the last number asked for is the next update's."""
        self._step = step
        return self.at is not None and step > self.at

    def note(self, variance: Tensor) -> None:
        """This rank's own part of the variance after an update: of one flat parameter, each once."""
        if self._parts is not None and self.at is None:
            self._parts.append(_size(variance))

    def ballot(self, variances: Callable[[], Iterable[Tensor]]) -> Tensor:
        """[1]: this rank's part of the norm; `variances` is asked for what `note` would have been given, where a
        checkpoint was loaded since."""
        if self._parts is None:
            self._parts = [_size(variance) for variance in variances()] if self.at is None else []
        if len(self._parts) > 1:
            self._parts = [torch.stack(self._parts).sum()]
        return torch.tensor([float(part) for part in self._parts] or [0.0], dtype=torch.float64)

    def decided(self, norm: float) -> None:
        """The norm of all ranks after the last update."""
        self._parts = []
        if self.at is not None:
            return
        self._norms.append(norm)
        seen = len(self._norms) > self._window and self._step > self._soonest
        settled = seen and self._norms[0] >= STABLE * norm > 0
        if settled if self._fixed is None else self._step >= self._fixed:
            self.at = self._step

    @property
    def norm(self) -> float:
        """Of the variance, as last heard."""
        return self._norms[-1] if self._norms else 0.0

    def state(self) -> Mapping[str, Any]:
        """For a checkpoint: numbers that all ranks share."""
        return {"frozen": self.at, "norms": list(self._norms)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue."""
        self.at, self._parts = state["frozen"], None
        self._norms = deque(state["norms"], self._norms.maxlen)


def _size(variance: Tensor) -> Tensor:
    return variance.sum(dtype=torch.float64)


def settle(
    piece: Piece,
    mean: Tensor,
    variance: Tensor,
    job: Job,
    transport: Transport,
    *,
    floor: float,
    fallback: float,
    scaled: bool,
) -> Sequence[float]:
    """Turn the moments of a piece into those of the compressed phase, in place.

    mean      becomes the mean without its bias, with `scaled` times the factor
    variance  becomes that factor of each element: 1 / (sqrt(its variance without bias, at least `floor` times the
              parameter's mean) + eps); `fallback` is the mean of a parameter that has had no gradient; 0 is
              nothing known, and the parameter stays as it is
    returns   that mean, of every parameter of the flat one
    """
    flat = piece.shard.flat
    means = [mean or fallback for mean in _means(piece, variance, job, transport)]
    for number, segment in enumerate(flat.segments):
        start, stop = max(segment.start, piece.start) - piece.start, min(segment.stop, piece.stop) - piece.start
        if start >= stop:
            continue
        hyper, step = job.hypers[segment.group], job.steps[segment.index]
        first, second = mean[start:stop], variance[start:stop]
        if step:
            first.div_(1 - hyper.betas[0] ** step)
            second.div_(1 - hyper.betas[1] ** step)
        if means[number] > 0:
            second.clamp_(min=floor * means[number]).sqrt_().add_(hyper.eps).reciprocal_()
        if scaled:
            first.mul_(second)
    return means


def factors(
    flat: Flat,
    variance: Tensor,
    looks: Mapping[str, int],
    hypers: Mapping[str, Hyper],
    *,
    floor: float,
    fallback: float,
    out: Tensor,
) -> None:
    """1 / (root of the variance without its bias, floored as in `settle`, + eps) of each element, where it is whole.

    variance  [size], as many gradients of each parameter in it as `looks` says
    out       [size], written within parameters; 0 where nothing is known
    """
    for segment in flat.segments:
        if segment.start == segment.stop:
            continue
        hyper, part = hypers[segment.group], out[segment.start : segment.stop]
        bias = 1 - hyper.betas[1] ** looks[segment.name] if looks[segment.name] else 1.0
        torch.div(variance[segment.start : segment.stop], bias, out=part)
        typical = part.mean(dtype=torch.float64)
        typical = torch.where(typical > 0, typical, fallback)
        part.clamp_(min=(floor * typical).to(part.dtype)).sqrt_().add_(hyper.eps).reciprocal_()
        part.masked_fill_(typical <= 0, 0)


def _means(piece: Piece, variance: Tensor, job: Job, transport: Transport) -> Sequence[float]:
    """Means of each parameter's variance without its bias, from what ranks own of it: the same bits on all of them."""
    flat: Flat = piece.shard.flat
    sums = torch.zeros(len(flat.segments), dtype=torch.float64, device=variance.device)
    low, high = piece.shard.owned
    for number, segment in enumerate(flat.segments):
        start, stop = max(segment.start, low) - piece.start, min(segment.stop, high) - piece.start
        step = job.steps[segment.index]
        if start < stop and step:
            beta2 = job.hypers[segment.group].betas[1]
            sums[number] = variance[start:stop].sum(dtype=torch.float64) / (1 - beta2**step)
    transport.all_reduce(sums, "sum", channel="rule", purpose="rule").wait()
    return [
        total / max(1, segment.stop - segment.start)
        for total, segment in zip(map(float, sums.unbind()), flat.segments, strict=True)
    ]
