"""What rules have in common that train as usual until the variance is frozen, and compress from then on."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from dsx.contracts import Job, Piece, Rule, Scope
from dsx.plugin import Context
from dsx_onebit.exchange import Exchange
from dsx_onebit.freeze import Freeze, expected
from dsx_onebit.owned import gather
from dsx_onebit.steps import add_gradient


class TwoPhases(Rule):
    """Decides with all ranks when the variance, state `exp_avg_sq`, is frozen; the rest is a subclass's.

    private  the name of those that can go on with states of the second phase
    whole    whether a rank has all of the states, or 1/N, with those of `owned.STATES`
    """

    communicates = True

    def __init__(self, freeze: int | None, beta2: float, block: int, private: str, whole: bool) -> None:
        self.block, self._whole = block, whole
        self._missing = False  # what `owned.gather` brings
        self._freeze = Freeze(freeze, beta2)
        self._private = private
        self._elements = 1

    def bind(self, ctx: Context) -> None:
        """What it needs of parts that are built after it."""
        self._ctx = ctx
        self._exchange = Exchange(ctx.transport, self.block)
        segments = (segment for shard in ctx.layout.shards for segment in shard.flat.segments)
        self._elements = max(1, sum(segment.stop - segment.start for segment in segments))

    @property
    def _fallback(self) -> float:
        """The variance of a parameter that has had no gradient: the mean of all."""
        return self._freeze.norm / self._elements

    def scope(self, step: int) -> Scope:
        return "local" if self._freeze.compresses(step) else "mean"

    def ballot(self) -> Tensor:
        return self._freeze.ballot(self._variances)

    def decided(self, summed: Sequence[float]) -> None:
        self._freeze.decided(summed[0])

    def state(self) -> Mapping[str, Any]:
        return {**self._freeze.state(), "whole": self._whole, "private": self._private if self._freeze.at else ""}

    def load(self, state: Mapping[str, Any]) -> None:
        if state.get("private") not in ("", self._private):
            super().load(state)
        if "frozen" in state:
            self._freeze.load(state)
            self._missing = not self._whole and state["whole"] and self._freeze.at is not None

    def derive(self, param: Tensor, states: Mapping[str, Tensor]) -> None:
        master = states["master"]
        if self._whole or master.data_ptr() == param.data_ptr():
            super().derive(param, states)
        else:
            param.copy_(master - states["weight_error"])

    def _mean_of_momenta(
        self,
        whole: Piece,
        states: Mapping[str, Tensor],
        job: Job,
        out: Tensor,
        ratios: Sequence[float] | None = None,
    ) -> Generator[None, None, Tensor]:
        """Each rank's gradient into its own momentum, and of those the mean, as far as signs tell it, of the part that
        this rank owns; the counts of `Exchange`."""
        flat, mean = whole.shard.flat, states["own_momentum"]
        if self._missing:
            gather(states, self._ctx.transport)
            self._missing = whole.shard is not self._ctx.layout.shards[-1]
        add_gradient(whole, states["grad"], mean, states["factor"], job, ratios)
        counts = self._exchange.counts(flat, job.used, mean.device)
        yield from self._exchange.average(mean, states["worker_error"], counts, out=out)
        return counts

    def _variances(self) -> Iterator[Tensor]:
        store = self._ctx.store
        for shard in self._ctx.layout.shards:
            held = store.fetch(shard.key, ["exp_avg_sq"])["exp_avg_sq"]
            yield owned(shard.piece(), held)
            store.put(shard.key, clean=["exp_avg_sq"])


def owned(piece: Piece, state: Tensor) -> Tensor:
    """What this rank counts of a state of a piece."""
    low, high = piece.shard.owned
    return state[low - piece.start : high - piece.start]


def notes(freeze: int | None, beta2: float, steps: int | None) -> Iterator[str]:
    """What people should know of a run with this freeze and so many updates."""
    settles = expected(beta2)
    frozen = freeze or settles
    if frozen < settles:
        yield (
            f"the variance is frozen after update {frozen}, but with betas[1] = {beta2:g} it settles at "
            f"about {settles}: compare with the optimizer that does not compress, or raise freeze"
        )
    if steps is None:
        return
    if frozen >= steps:
        yield f"no update is compressed: the freeze is at about {frozen}, and run.steps is {steps}"
    elif steps < SHORT:
        yield f"{steps} updates are few for a freeze: at 300 it cost a prototype 4 % of the loss, at {SHORT} under 1 %"
    elif frozen > FIFTH * steps:
        yield (
            f"{frozen} of {steps} updates come before the freeze, so that more than a fifth of the bytes of an "
            f"all-reduce in bf16 travel: run longer, or lower betas[1]"
        )


SHORT = 1_500
"""Updates at which a freeze after 15 % was seen to cost little (docs/decisions/0018)."""

FIFTH = 0.144
"""Part of a run whose exchange, in bf16, and 1/15.5 of it for the rest make a fifth of bf16's bytes."""
