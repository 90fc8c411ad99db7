"""Plugin `zero_one_adam`: Adam that looks at the variance ever less often, and then lets ranks make updates of their
own (Lu et al. 2022, arXiv 2202.06009, algorithm 1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Flat, Hyper, Job, Piece, Rule, Scope, State
from dsx.plugin import Context, Descriptor, Fill, Need, Part, fraction, hook, non_negative, positive
from dsx_kernels.accumulate import accumulate
from dsx_kernels.momentum import momentum
from dsx_kernels.sgd import sgd
from dsx_onebit.exchange import Exchange, Share
from dsx_onebit.freeze import factors
from dsx_onebit.intervals import meets, renews
from dsx_onebit.steps import GROUP, Rooms, adam_step, add_gradient, check_block, separate

Beta = Annotated[float, fraction]
Phase = Literal["exact", "shared", "local"]
NAME = "zero_one_adam"


@frozen(kw_only=True)
class Options:
    """`[optimize.zero_one_adam]`; the first four are those of `adamw`. DeepSpeed's names in brackets.

    lr              learning rate
    betas           decay of the means of the gradient and of its square
    eps             added to the root of the mean square
    weight_decay    decoupled: each update takes lr * weight_decay of a weight off it
    freeze          the last update that may look at the variance; local updates follow (var_freeze_step)
    variance_scale  looks at the variance after which their distance doubles (var_update_scaler)
    local_scale     local updates after which the distance of exchanges doubles (local_step_scaler)
    local_limit     the largest distance of exchanges; 1: one in each update (local_step_clipper)
    block           elements that share a scale; a multiple of 1,024
    floor           least variance of an element, as a part of its parameter's mean
    """

    lr: Annotated[float, non_negative] = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, non_negative] = 1e-8
    weight_decay: Annotated[float, non_negative] = 1e-2
    freeze: Annotated[int, positive] = 100_000
    variance_scale: Annotated[int, positive] = 16
    local_scale: Annotated[int, positive] = 32_678
    local_limit: Annotated[int, positive] = 16
    block: Annotated[int, positive] = GROUP
    floor: Annotated[float, non_negative] = 0.01

    def __attrs_post_init__(self) -> None:
        check_block(self.block)


class ZeroOneAdam(Rule):
    """AdamW while every update looks at the variance ("exact"). Then, in the others, signs of the gradient travel
    ("shared"). After `freeze` each rank moves by itself, and now and then signs of how far bring them together
    ("local").

    exp_avg       the momentum; from "shared" on times the factor, in "local" each rank's own
    exp_avg_sq    the variance; in "local" the factor, which does not change any more
    moved         in "shared" the factor 1 / (root of the variance + eps); in "local" how far this rank is from the
                  weights
    worker_error  what this rank's signs have not told yet
    owner_error   what the owner's signs have not told yet
    """

    communicates = True

    def __init__(self, options: Options) -> None:
        self._options, self.block = options, options.block
        self.apart = options.local_limit > 1
        self.hyper = Hyper(lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)
        self.states = [
            State("exp_avg", scope="rank", resize="mean"),
            State("exp_avg_sq"),
            State("moved", scope="rank", resize="mean"),
            State("worker_error", scope="rank", resize="mean"),
            State("owner_error", scope="chunk"),
        ]
        self._phase: Phase = "exact"
        self._looks = Counter[str]()  # at the variance of each parameter
        self._rates: dict[str, float] = {}  # sums of learning rates since ranks were together
        self._typical = 0.0  # variance of an element, when it was last looked at
        self._sizes: list[Tensor] = []
        self._rooms = Rooms()

    def bind(self, ctx: Context) -> None:
        """What it needs of parts that are built after it."""
        self._exchange = Exchange(ctx.transport, self.block)
        self._last = ctx.layout.shards[-1] if ctx.layout.shards else None
        segments = (segment for shard in ctx.layout.shards for segment in shard.flat.segments)
        self._elements = max(1, sum(segment.stop - segment.start for segment in segments))

    def scope(self, step: int) -> Scope:
        looks = self._phase == "exact" or (self._phase == "shared" and self._renews(step))
        return "mean" if looks else "local"

    def _renews(self, step: int) -> bool:
        return renews(step, self._options.variance_scale)

    def state(self) -> Mapping[str, Any]:
        return {
            "private": NAME,
            "phase": self._phase,
            "looks": self._looks,
            "rates": self._rates,
            "typical": self._typical,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if state.get("private") != NAME:
            super().load(state)
            return
        self._phase, self._typical = state["phase"], state["typical"]
        self._looks, self._rates = Counter(state["looks"]), dict(state["rates"])

    def derive(self, param: Tensor, states: Mapping[str, Tensor]) -> None:
        if self._phase != "local":
            super().derive(param, states)
        elif param.data_ptr() != states["master"].data_ptr():
            with self._rooms.lent(states["master"]) as room:
                param.copy_(torch.sub(states["master"], states["moved"], out=room))

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> Iterator[None]:
        if self._phase == "exact":
            self._exact(piece, states, job)
        elif self._phase == "local":
            yield from self._local(piece, states, job)
        elif self._renews(job.number):
            self._renewed(piece, states, job)
        else:
            yield from self._shared(piece, states, job)
        following = self._following(job.number)
        if following != self._phase:
            self._turn(piece, states, job, following)
        if piece.shard is self._last:
            self._phase = following
            if self._sizes:
                self._typical = float(torch.stack(self._sizes).sum()) / self._elements
                self._sizes.clear()

    def _following(self, number: int) -> Phase:
        """The phase of the update after this one."""
        if self._phase == "local" or number >= self._options.freeze:
            return "local"
        return "exact" if self._phase == "exact" and self._renews(number + 1) else "shared"

    def _turn(self, piece: Piece, states: Mapping[str, Tensor], job: Job, following: Phase) -> None:
        """Make the states those of another phase."""
        mean, variance, moved = states["exp_avg"], states["exp_avg_sq"], states["moved"]
        if self._phase == "exact":
            for segment in piece.shard.flat.segments:
                if step := job.steps[segment.index]:
                    mean[segment.start : segment.stop].div_(1 - job.hypers[segment.group].betas[0] ** step)
            self._factors(piece.shard.flat, variance, job, out=moved)
            mean.mul_(moved)
        if following == "local":
            variance.copy_(moved)
            for name in ("moved", "worker_error", "owner_error"):
                states[name].zero_()

    def _exact(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        adam_step(piece, states, job)
        for segment in piece.shard.flat.segments:
            self._looks[segment.name] = job.steps[segment.index]
        self._note(piece.shard.flat, states["exp_avg_sq"], job)

    def _renewed(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        """The gradient's mean is known: look at the variance. What is held in units of the factor changes with it."""
        flat, variance, factor = piece.shard.flat, states["exp_avg_sq"], states["moved"]
        with self._rooms.lent(variance) as gradient:
            self._take(piece, states["grad"], job, out=gradient)
            for run in piece.runs(job):
                beta = run.hyper.betas[1]
                variance[run.where].mul_(beta).addcmul_(gradient[run.where], gradient[run.where], value=1 - beta)
        for segment in flat.segments:
            self._looks[segment.name] += job.used[segment.index]
        with self._rooms.lent(variance) as new, self._rooms.lent(variance) as ratio:
            self._factors(flat, variance, job, out=new.zero_())
            torch.div(new, factor, out=ratio).masked_fill_(factor == 0, 0)
            factor.copy_(new)
            for name in ("exp_avg", "worker_error"):
                states[name].mul_(ratio)
            states["owner_error"].mul_(ratio[self._exchange.own(flat)])
        self._note(flat, variance, job)
        add_gradient(piece, states["grad"], states["exp_avg"], factor, job)
        self._step(piece, states, job)

    def _shared(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> Iterator[None]:
        """Signs of the gradient, times the factor, travel."""
        flat = piece.shard.flat
        share = Share.of(flat, states["grad"], states["moved"], job)
        with self._rooms.lent(states["exp_avg"]) as gradient:
            yield from self._average(flat, gradient, states, job.used, share)
            for run in piece.runs(job):
                momentum(states["exp_avg"][run.where], gradient[run.where], beta=run.hyper.betas[0])
        self._step(piece, states, job)

    def _local(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> Iterator[None]:
        """This rank moves by itself. The decay is taken off the weights that all have in common."""
        flat, mean, moved, master = piece.shard.flat, states["exp_avg"], states["moved"], states["master"]
        options = self._options
        together = meets(job.number, options.freeze, options.local_scale, options.local_limit)
        add_gradient(piece, states["grad"], mean, states["exp_avg_sq"], job)
        for run in piece.runs(job):
            accumulate(moved[run.where], mean[run.where], run.hyper.lr)
            if run.hyper.weight_decay and not together:
                master[run.where].mul_(1 - run.hyper.lr * run.hyper.weight_decay)
        for segment in flat.segments:
            if job.used[segment.index]:
                self._rates[segment.name] = self._rates.get(segment.name, 0.0) + job.hypers[segment.group].lr
        if together:
            yield from self._meet(flat, states, job)
        else:
            self.derive(states["param"], states)

    def _meet(self, flat: Flat, states: Mapping[str, Tensor], job: Job) -> Iterator[None]:
        """Everyone's weights decay, and move by the mean of how far ranks are; that over the rates is the common
        momentum."""
        mean, moved, master = states["exp_avg"], states["moved"], states["master"]
        moving = [False] * len(job.used)
        for segment in flat.segments:
            moving[segment.index] = self._rates.get(segment.name, 0.0) > 0
        yield from self._average(flat, moved, states, moving)
        copied = separate(states)
        for where, rate, decay in self._together(flat, job):
            torch.div(moved[where], rate, out=mean[where])
            param = states["param"][where] if copied else None
            sgd(moved[where], master[where], None, param, lr=1.0, weight_decay=decay, step=1)
            moved[where].zero_()

    def _together(self, flat: Flat, job: Job) -> Iterator[tuple[slice, float, float]]:
        """(where, sum of rates, this update's decay) of what has moved, which is forgotten; neighbours of the same are
        one."""
        start = stop = 0
        numbers = 0.0, 0.0
        for segment in flat.segments:
            hyper, rate = job.hypers[segment.group], self._rates.pop(segment.name, 0.0)
            own = rate, hyper.lr * hyper.weight_decay if job.used[segment.index] else 0.0
            if (segment.start, own) != (stop, numbers):
                if numbers[0]:
                    yield slice(start, stop), *numbers
                start, numbers = segment.start, own
            stop = segment.stop
        if numbers[0]:
            yield slice(start, stop), *numbers

    def _average(
        self,
        flat: Flat,
        value: Tensor,
        states: Mapping[str, Tensor],
        used: Sequence[bool],
        share: Share | None = None,
    ) -> Iterator[None]:
        """Of all ranks' values, as far as signs tell, in place; of a share alone if there is one."""
        counts = self._exchange.counts(flat, used, value.device)
        own, told = value[self._exchange.own(flat)], value if share is None else None
        yield from self._exchange.average(told, states["worker_error"], counts, out=own, share=share)
        yield from self._exchange.spread(own, states["owner_error"], counts, out=value)

    def _take(self, piece: Piece, gradient: Tensor, job: Job, out: Tensor) -> None:
        """A gradient, clipped."""
        out.zero_()
        for run in piece.runs(job):
            momentum(
                out[run.where],
                gradient[run.where],
                beta=0.0,
                multiplier=job.multiplier,
                clip_value=run.hyper.get("clip_value"),
            )

    def _step(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        copied = separate(states)
        for run in piece.runs(job):
            sgd(
                states["exp_avg"][run.where],
                states["master"][run.where],
                None,
                states["param"][run.where] if copied else None,
                lr=run.hyper.lr,
                weight_decay=run.hyper.weight_decay,
                step=run.step,
            )

    def _factors(self, flat: Flat, variance: Tensor, job: Job, out: Tensor) -> None:
        fallback = self._typical
        factors(flat, variance, self._looks, job.hypers, floor=self._options.floor, fallback=fallback, out=out)

    def _note(self, flat: Flat, variance: Tensor, job: Job) -> None:
        """This flat parameter's part of the variance of all, without its bias."""
        for segment in flat.segments:
            if looks := self._looks[segment.name]:
                bias = 1 - job.hypers[segment.group].betas[1] ** looks
                self._sizes.append(variance[segment.start : segment.stop].sum(dtype=torch.float64) / bias)


def _notes(options: Options, steps: int | None) -> Iterator[str]:
    """What people should know of a run with these options and so many updates."""
    if steps is None:
        return
    exact = min(options.variance_scale + 1, options.freeze)
    if steps <= exact:
        yield f"no update is compressed: the first {exact} look at the variance, and run.steps is {steps}"
    elif steps <= options.freeze:
        yield (
            f"no rank makes updates of its own: they follow update {options.freeze}, and run.steps is {steps}; set "
            f"freeze to the end of the learning rate's warm-up"
        )


descriptor = Descriptor(
    name=NAME,
    section="optimize",
    contract=1,
    options=Options,
    fills={
        "rule": Fill(
            needs=[
                Need("gradients.local", "it compresses each rank's own gradient, and this layout averages them first"),
                Need("parameter.whole", "every rank makes updates of its own"),
                Need("optimizer.whole", "every rank makes updates of its own, for which it needs all of the states"),
            ]
        )
    },
    summary="Adam that sends one bit an element, and later not in every update",
    notes=_notes,
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("rule", lambda ctx: ZeroOneAdam(options), ZeroOneAdam.bind)]
