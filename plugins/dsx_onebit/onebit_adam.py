"""Plugin `onebit_adam`: Adam whose momentum travels as signs once the variance of the gradients has settled (Tang et
al. 2021, arXiv 2102.02888, algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from attrs import frozen
from torch import Tensor

from dsx.contracts import Hyper, Job, Piece, Rule, Scope, State
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Need, Part, Plan, choice, fraction, hook, non_negative, positive
from dsx_kernels.adamw import adamw
from dsx_kernels.momentum import momentum
from dsx_kernels.sgd import sgd
from dsx_onebit.exchange import Exchange
from dsx_onebit.freeze import Freeze, expected, settle
from dsx_onebit.owned import STATES, change, gather

Beta = Annotated[float, fraction]
GROUP = 1024
"""Blocks are multiples of it: how signs lie in words."""


@frozen(kw_only=True)
class Options:
    """`[optimize.onebit_adam]`; the first four are those of `adamw`.

    lr            learning rate
    betas         decay of the means of the gradient and of its square
    eps           added to the root of the mean square
    weight_decay  decoupled: each update takes lr * weight_decay of a weight off it
    freeze        after which update only signs travel; None: after the one at which the variance has settled
    signs         of what: "scaled", the momentum over the root of the variance; "momentum", as in the paper
    block         elements that share a scale; a multiple of 1,024
    floor         least variance of an element, as a part of its parameter's mean
    """

    lr: Annotated[float, non_negative] = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, non_negative] = 1e-8
    weight_decay: Annotated[float, non_negative] = 1e-2
    freeze: Annotated[int, positive] | None = None
    signs: Annotated[str, choice("scaled", "momentum")] = "scaled"
    block: Annotated[int, positive] = GROUP
    floor: Annotated[float, non_negative] = 0.01

    def __attrs_post_init__(self) -> None:
        if self.block % GROUP:
            raise ValueError(f"block = {self.block} is no multiple of {GROUP}: take {-(-self.block // GROUP) * GROUP}")


class OneBitAdam(Rule):
    """AdamW until the freeze. Then each rank adds its own gradient to the common momentum, and signs of it travel.

    exp_avg       the momentum; after the freeze what all ranks decompressed, over the root of the variance if `scaled`
    exp_avg_sq    the variance; after the freeze what the momentum is multiplied by
    worker_error  what this rank's signs have not told yet
    owner_error   what the owner's signs have not told yet
    """

    communicates = True

    def __init__(self, options: Options, plan: Plan) -> None:
        self._options, self._scaled = options, options.signs == "scaled"
        self._kind = "scaled momentum" if self._scaled else "momentum"
        self.block = options.block
        self.hyper = Hyper(lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)
        self._freeze = Freeze(options.freeze, options.betas[1])
        self.states: list[State] = [
            State("exp_avg"),
            State("exp_avg_sq"),
            State("worker_error", scope="rank", resize="mean"),
        ]
        self._whole = "optimizer.whole" in plan.offers
        self.states.extend([State("owner_error", scope="chunk")] if self._whole else STATES)
        self._missing = False
        self._elements = 1

    def bind(self, ctx: Context) -> None:
        """What it needs of parts that are built after it."""
        self._ctx = ctx
        self._exchange = Exchange(ctx.transport, self.block)
        segments = (segment for shard in ctx.layout.shards for segment in shard.flat.segments)
        self._elements = max(1, sum(segment.stop - segment.start for segment in segments))

    def scope(self, step: int) -> Scope:
        return "local" if self._freeze.compresses(step) else "mean"

    def ballot(self) -> Tensor:
        return self._freeze.ballot(self._variances)

    def decided(self, summed: Sequence[float]) -> None:
        self._freeze.decided(summed[0])

    def state(self) -> Mapping[str, Any]:
        private = f"onebit_adam with signs of the {self._kind}" if self._freeze.at else ""
        return {**self._freeze.state(), "whole": self._whole, "private": private}

    def load(self, state: Mapping[str, Any]) -> None:
        self._freeze.load(state)
        if state["private"] not in ("", self.state()["private"]):
            super().load(state)
        self._missing = not self._whole and state["whole"] and self._freeze.at is not None

    def derive(self, param: Tensor, states: Mapping[str, Tensor]) -> None:
        master = states["master"]
        if self._whole or master.data_ptr() == param.data_ptr():
            super().derive(param, states)
        else:
            param.copy_(master - states["weight_error"])

    def _variances(self) -> Iterator[Tensor]:
        store = self._ctx.store
        for shard in self._ctx.layout.shards:
            held = store.fetch(shard.key, ["exp_avg_sq"])["exp_avg_sq"]
            yield _owned(shard.piece(), held)
            store.put(shard.key, clean=["exp_avg_sq"])

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> None:
        if self._freeze.compresses(job.number):
            (self._compressed if self._whole else self._parted)(piece, states, job)
            return
        self._warm_up(piece, states, job)
        self._freeze.note(_owned(piece, states["exp_avg_sq"]))
        if self._freeze.at == job.number:
            self._settle(piece, states, job)

    def _warm_up(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        copied = states["param"].data_ptr() != states["master"].data_ptr()
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

    def _settle(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        settle(
            piece,
            states["exp_avg"],
            states["exp_avg_sq"],
            job,
            self._ctx.transport,
            floor=self._options.floor,
            fallback=self._freeze.norm / self._elements,
            scaled=self._scaled,
        )
        if not self._whole:
            gather(states, self._ctx.transport)

    def _parted(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        """An update where this rank has 1/N of the states."""
        flat, exchange = piece.shard.flat, self._exchange
        if self._missing:
            gather(states, self._ctx.transport)
        whole = Piece(piece.shard, 0, flat.size)
        self._add_gradient(whole, states["grad"], states["own_momentum"], states["factor"], job)
        counts = exchange.counts(flat, job.used, states["grad"].device)
        exchange.average(states["own_momentum"], states["worker_error"], counts, out=states["exp_avg"])
        change(whole, exchange.own(flat), states, job, counts, exchange)
        self._missing = self._missing and piece.shard is not self._ctx.layout.shards[-1]

    def _compressed(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        mean, factor, exchange = states["exp_avg"], states["exp_avg_sq"], self._exchange
        self._add_gradient(piece, states["grad"], mean, factor, job)
        counts = exchange.counts(piece.shard.flat, job.used, mean.device)
        own = mean[exchange.own(piece.shard.flat)]
        exchange.average(mean, states["worker_error"], counts, out=own)
        exchange.spread(own, states["owner_error"], counts, out=mean)
        copied = states["param"].data_ptr() != states["master"].data_ptr()
        for run in piece.runs(job):
            step, weights = mean[run.where], states["master"][run.where]
            if not self._scaled:
                step = step * factor[run.where]
            sgd(
                step,
                weights,
                None,
                states["param"][run.where] if copied else None,
                lr=run.hyper.lr,
                weight_decay=run.hyper.weight_decay,
                step=run.step,
            )

    def _add_gradient(self, piece: Piece, gradient: Tensor, mean: Tensor, factor: Tensor, job: Job) -> None:
        for run in piece.runs(job):
            momentum(
                mean[run.where],
                gradient[run.where],
                factor[run.where] if self._scaled else None,
                beta=run.hyper.betas[0],
                multiplier=job.multiplier,
                clip_value=run.hyper.get("clip_value"),
            )


def _owned(piece: Piece, state: Tensor) -> Tensor:
    """What this rank counts of a state of a piece."""
    low, high = piece.shard.owned
    return state[low - piece.start : high - piece.start]


def _notes(options: Options, steps: int | None) -> Iterator[str]:
    """What people should know of a run with these options and so many updates."""
    settles = expected(options.betas[1])
    frozen = options.freeze or settles
    if frozen < settles:
        yield (
            f"the variance is frozen after update {frozen}, but with betas[1] = {options.betas[1]:g} it settles at "
            f"about {settles}: compare with adamw, or raise freeze"
        )
    if steps is None:
        return
    if frozen >= steps:
        yield f"no update is compressed: the freeze is at about {frozen}, and run.steps is {steps}"
    elif steps < SHORT:
        yield f"{steps} updates are few for a freeze: at 300 it cost a prototype 4 % of the loss, at {SHORT} under 1 %"
    elif frozen > FIFTH * steps:
        yield (
            f"{frozen} of {steps} updates come before the freeze, so that more than a fifth of the bytes of adamw in "
            f"bf16 travel: run longer, or lower betas[1]"
        )


SHORT = 1_500
"""Updates at which a freeze after 15 % was seen to cost little (docs/decisions/0018)."""

FIFTH = 0.144
"""Part of a run whose exchange, in bf16, and 1/15.5 of it for the rest make a fifth of bf16's bytes."""

descriptor = Descriptor(
    name="onebit_adam",
    section="optimize",
    contract=1,
    options=Options,
    fills={
        "rule": Fill(
            needs=[
                Need("gradients.local", "it compresses each rank's own gradient, and this layout averages them first"),
                Need("parameter.whole", "every rank applies the signs to its own parameters"),
            ]
        )
    },
    summary="Adam that sends one bit an element once the variance has settled",
    notes=_notes,
)


@hook
def dsx_optimize(options: Options, plan: Plan) -> list[Part]:
    if options.signs == "momentum" and "optimizer.whole" not in plan.offers:
        raise DsxError(
            'signs = "momentum" needs every rank to have the whole variance',
            where="[optimize.onebit_adam] signs",
            remedy='leave it at "scaled", or remove the layout that shards the optimizer\'s states',
        )
    return [Part("rule", lambda ctx: OneBitAdam(options, plan), OneBitAdam.bind)]
