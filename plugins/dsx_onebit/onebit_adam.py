"""Plugin `onebit_adam`: Adam whose momentum travels as signs once the variance of the gradients has settled (Tang et
al. 2021, arXiv 2102.02888, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated

from attrs import frozen
from torch import Tensor

from dsx.contracts import Flat, Hyper, Job, Piece, State
from dsx.errors import DsxError
from dsx.plugin import Descriptor, Fill, Need, Part, Plan, choice, fraction, hook, non_negative, positive
from dsx_kernels.sgd import sgd
from dsx_onebit import sizes
from dsx_onebit.exchange import Share
from dsx_onebit.freeze import settle
from dsx_onebit.owned import STATES, change, gather, runs, weights
from dsx_onebit.phases import TwoPhases, notes, owned
from dsx_onebit.steps import GROUP, Rooms, adam_step, check_block, separate

Beta = Annotated[float, fraction]


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
    follow        the size of the frozen variance follows each parameter's gradients; not in the paper
    """

    lr: Annotated[float, non_negative] = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, non_negative] = 1e-8
    weight_decay: Annotated[float, non_negative] = 1e-2
    freeze: Annotated[int, positive] | None = None
    signs: Annotated[str, choice("scaled", "momentum")] = "scaled"
    block: Annotated[int, positive] = GROUP
    floor: Annotated[float, non_negative] = 0.01
    follow: bool = False

    def __attrs_post_init__(self) -> None:
        check_block(self.block)


class OneBitAdam(TwoPhases):
    """AdamW until the freeze. Then each rank adds its own gradient to the common momentum, and signs of it travel.

    exp_avg       the momentum; after the freeze what all ranks decompressed, over the root of the variance if `scaled`
    exp_avg_sq    the variance; after the freeze what the momentum is multiplied by
    worker_error  what this rank's signs have not told yet
    owner_error   what the owner's signs have not told yet
    size          and the others of `sizes.STATES`: how large gradients are, and were
    """

    def __init__(self, options: Options, plan: Plan) -> None:
        self._options, self._scaled = options, options.signs == "scaled"
        kind, whole = "scaled momentum" if self._scaled else "momentum", "optimizer.whole" in plan.offers
        name = f"onebit_adam with signs of the {kind}"
        super().__init__(options.freeze, options.betas[1], options.block, name, whole)
        self.hyper = Hyper(lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)
        self.states: list[State] = [
            State("exp_avg"),
            State("exp_avg_sq"),
            State("worker_error", scope="rank", resize="mean"),
            *([State("owner_error", scope="chunk")] if whole else STATES),
            *(sizes.STATES if options.follow else ()),
        ]
        self._rooms = Rooms()

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> Iterator[None] | None:
        if self._freeze.compresses(job.number):
            return (self._compressed if self._whole else self._parted)(piece, states, job)
        adam_step(piece, states, job)
        self._freeze.note(owned(piece, states["exp_avg_sq"]))
        if self._freeze.at == job.number:
            self._settle(piece, states, job)
        return None

    def _settle(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        settle(
            piece,
            states["exp_avg"],
            states["exp_avg_sq"],
            job,
            self._ctx.transport,
            floor=self._options.floor,
            fallback=self._fallback,
            scaled=self._scaled,
        )
        if not self._whole:
            gather(states, self._ctx.transport)

    def _parted(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> Iterator[None]:
        """An update where this rank has 1/N of the states."""
        whole, own = Piece(piece.shard, 0, piece.shard.flat.size), self._exchange.own(piece.shard.flat)
        ratios, remember = self._look(piece.shard.flat, states, job)
        counts = yield from self._mean_of_momenta(whole, states, job, out=states["exp_avg"], ratios=ratios)
        master, apart = weights(states, own)
        with self._rooms.lent(states["exp_avg"]) as room:
            step = None if apart else room.zero_()
            for run, here in runs(whole, own, job):
                mean, decay = states["exp_avg"][here], run.hyper.weight_decay
                if step is None:
                    left = states["weight_error"][here]
                    sgd(mean, master[here], None, left, lr=run.hyper.lr, weight_decay=decay, step=run.step)
                else:
                    step[here].add_(mean).add_(master[here], alpha=decay).mul_(-run.hyper.lr)
            yield from change(whole, own, states, job, counts, self._exchange, step)
        remember()

    def _look(
        self, flat: Flat, states: Mapping[str, Tensor], job: Job
    ) -> tuple[Sequence[float] | None, Callable[[], None]]:
        """What each parameter's factors are multiplied by in this update, and what ends the look at its gradient."""
        if not self._options.follow:
            return None, lambda: None
        return sizes.ratios(flat, states, job), sizes.look(flat, states["grad"], states, job, self._ctx.transport)

    def _compressed(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> Iterator[None]:
        mean, factor, exchange = states["exp_avg"], states["exp_avg_sq"], self._exchange
        flat = piece.shard.flat
        ratios, remember = self._look(flat, states, job)
        share = Share.of(flat, states["grad"], factor if self._scaled else None, job, ratios)
        counts = exchange.counts(flat, job.used, mean.device)
        own = mean[exchange.own(flat)]
        yield from exchange.average(mean, states["worker_error"], counts, out=own, share=share)
        yield from exchange.spread(own, states["owner_error"], counts, out=mean)
        remember()
        copied = separate(states)
        for run in piece.runs(job):
            step = mean[run.where]
            if not self._scaled:
                step = step * factor[run.where]
            sgd(
                step,
                states["master"][run.where],
                None,
                states["param"][run.where] if copied else None,
                lr=run.hyper.lr,
                weight_decay=run.hyper.weight_decay,
                step=run.step,
            )


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
    notes=lambda options, steps: notes(options.freeze, options.betas[1], steps),
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
