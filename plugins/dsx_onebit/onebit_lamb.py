"""Plugin `onebit_lamb`: LAMB whose momentum travels as signs once the variance of the gradients has settled (Li et al.
2022, arXiv 2104.06069, algorithm 1)."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Hyper, Job, Piece, Segment, State
from dsx.plugin import Descriptor, Fill, Need, Part, Plan, fraction, hook, non_negative, positive
from dsx_kernels.accumulate import accumulate
from dsx_kernels.adamw import adamw
from dsx_kernels.lamb import lamb
from dsx_kernels.sgd import sgd
from dsx_kernels.squares import squares
from dsx_onebit.exchange import Share
from dsx_onebit.freeze import settle
from dsx_onebit.owned import STATES, change, gather, weights
from dsx_onebit.phases import TwoPhases, notes, owned
from dsx_onebit.steps import GROUP, Rooms, check_block, separate

Beta = Annotated[float, fraction]


@frozen(kw_only=True)
class Options:
    """`[optimize.onebit_lamb]`; DeepSpeed's names in brackets where they are others.

    lr                learning rate
    betas             decay of the means of the gradient and of its square
    eps               added to the root of the mean square
    weight_decay      times the weight, is added to a step before its size is measured
    max_coeff         largest size of a parameter's step: of its weights' norm over that of the step
    min_coeff         smallest
    freeze            after which update only signs travel; None: after the one at which the variance has settled
                      (freeze_step)
    coeff_beta        decay of the mean of that size, which is kept at the freeze
    factor_max        largest factor on the size after the freeze
    factor_min        smallest
    factor_threshold  by how much of itself the factor may change in an update
    block             elements that share a scale; a multiple of 1,024
    floor             least variance of an element, as a part of its parameter's mean
    """

    lr: Annotated[float, non_negative] = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, non_negative] = 1e-8
    weight_decay: Annotated[float, non_negative] = 1e-2
    max_coeff: Annotated[float, positive] = 10.0
    min_coeff: Annotated[float, non_negative] = 0.01
    freeze: Annotated[int, positive] | None = None
    coeff_beta: Beta = 0.9
    factor_max: Annotated[float, positive] = 4.0
    factor_min: Annotated[float, positive] = 0.5
    factor_threshold: Annotated[float, positive] = 0.1
    block: Annotated[int, positive] = GROUP
    floor: Annotated[float, non_negative] = 0.01

    def __attrs_post_init__(self) -> None:
        check_block(self.block)
        for least, most in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            if getattr(self, least) > getattr(self, most):
                raise ValueError(f"{least} = {getattr(self, least):g} is above {most} = {getattr(self, most):g}")


class OneBitLamb(TwoPhases):
    """LAMB until the freeze. Then each rank adds its own gradient to the common momentum, over the root of the
    variance, and signs of it travel; how large a parameter's step is follows from the mean of what it was, and from how
    the variance of what arrives compares with the frozen one.

    exp_avg       the momentum; after the freeze what all ranks decompressed, over the root of the variance
    exp_avg_sq    the variance; after the freeze the factor 1 / (its root + eps)
    fresh         after the freeze the variance of the gradients that the momentum tells of, times the factor's square
    least         after the freeze the least variance of each parameter
    coefficient   the mean of the sizes of its steps
    ratio         the last factor on that
    worker_error  what this rank's signs have not told yet
    owner_error   what the owner's signs have not told yet
    """

    def __init__(self, options: Options, plan: Plan) -> None:
        whole = "optimizer.whole" in plan.offers
        super().__init__(options.freeze, options.betas[1], options.block, "onebit_lamb", whole)
        self._options = options
        self.hyper = Hyper(lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)
        self.states = [
            State("exp_avg"),
            State("exp_avg_sq"),
            State("fresh"),
            State("least", shape="segment"),
            State("coefficient", shape="segment"),
            State("ratio", shape="segment"),
            State("worker_error", scope="rank", resize="mean"),
            *([State("owner_error", scope="chunk")] if whole else STATES),
        ]
        self._rooms = Rooms()

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> Iterator[None]:
        if self._freeze.compresses(job.number):
            yield from (self._compressed if self._whole else self._parted)(piece, states, job)
            return
        with self._rooms.lent(states["master"]) as step:
            yield from self._warm_up(piece, states, job, step.zero_())
        self._freeze.note(owned(piece, states["exp_avg_sq"]))
        if self._freeze.at == job.number:
            self._settle(piece, states, job)

    def _warm_up(self, piece: Piece, states: Mapping[str, Tensor], job: Job, step: Tensor) -> Iterator[None]:
        """LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2). `step` is room, of zeros."""
        master, options = states["master"], self._options
        for run in piece.runs(job):
            moments = states["exp_avg"][run.where], states["exp_avg_sq"][run.where]
            adamw(  # weights of 0 that go by a rate of 1: the step itself
                states["grad"][run.where],
                step[run.where],
                *moments,
                lr=1.0,
                betas=run.hyper.betas,
                eps=run.hyper.eps,
                weight_decay=0.0,
                step=run.step,
                multiplier=job.multiplier,
                clip_value=run.hyper.get("clip_value"),
            )
            accumulate(step[run.where], master[run.where], -run.hyper.weight_decay)
        norms, steps = yield from self._norms(piece, master, step)
        known = (norms > 0) & (steps > 0)
        size = torch.where(known, (norms / steps).clamp(options.min_coeff, options.max_coeff), 1.0)
        mean = states["coefficient"]
        mean.copy_(torch.where(_used(piece, job, mean), mean.lerp(size, 1 - options.coeff_beta), mean))
        self._go(piece, states, job, self._sized(piece, step, size))

    def _settle(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        """Turn the states into those of the compressed phase."""
        options, (mean, factor) = self._options, (states["exp_avg"], states["exp_avg_sq"])
        floor, fallback, transport = options.floor, self._fallback, self._ctx.transport
        means = settle(piece, mean, factor, job, transport, floor=floor, fallback=fallback, scaled=True)
        states["least"].copy_(torch.tensor(means, dtype=torch.float64).mul_(floor))
        states["ratio"].fill_(1)
        for number, segment in enumerate(piece.shard.flat.segments):
            if updates := job.steps[segment.index]:
                states["coefficient"][number].div_(1 - options.coeff_beta**updates)
            else:
                states["coefficient"][number].fill_(min(max(1.0, options.min_coeff), options.max_coeff))
        for _, segment, here in _spans(piece):
            eps = job.hypers[segment.group].eps
            torch.mul(factor[here], -eps, out=states["fresh"][here]).add_(1).square_()  # the frozen one
        if not self._whole:
            gather(states, transport)

    def _compressed(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> Iterator[None]:
        flat, mean, exchange = piece.shard.flat, states["exp_avg"], self._exchange
        with self._rooms.lent(mean) as new:
            share = Share.of(flat, states["grad"], states["exp_avg_sq"], job)
            counts = exchange.counts(flat, job.used, mean.device)
            own = new[exchange.own(flat)]
            yield from exchange.average(mean, states["worker_error"], counts, out=own, share=share)
            yield from exchange.spread(own, states["owner_error"], counts, out=new)
            size = yield from self._sizes(piece, states, job, new, states["master"])
        self._move(piece, states, job, size, states["master"], states["param"] if separate(states) else None)

    def _parted(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> Iterator[None]:
        """An update where this rank has 1/N of the states."""
        whole, own = Piece(piece.shard, 0, piece.shard.flat.size), self._exchange.own(piece.shard.flat)
        mean, (master, apart) = states["exp_avg"], weights(states, own)
        with self._rooms.lent(mean) as new:
            counts = yield from self._mean_of_momenta(whole, states, job, out=new)
            size = yield from self._sizes(piece, states, job, new, master)
            step = None
            if apart:
                self._move(piece, states, job, size, master, states["weight_error"])
            else:
                step = new.zero_()
                for number, segment, here in _spans(piece):
                    if job.used[segment.index]:
                        hyper = job.hypers[segment.group]
                        along = step[here].add_(mean[here]).add_(master[here], alpha=hyper.weight_decay)
                        along.mul_(-hyper.lr * size[number])
            yield from change(whole, own, states, job, counts, self._exchange, step)

    def _sizes(
        self, piece: Piece, states: Mapping[str, Tensor], job: Job, new: Tensor, master: Tensor
    ) -> Generator[None, None, Tensor]:
        """How large steps are [parameters of the flat one], from the new momentum; the old one and the fresh variance
        follow it."""
        leasts = states["least"].tolist()
        found = new.new_zeros(3, len(leasts))  # sums of squares of momenta and of steps, and least roots
        found[2].fill_(torch.inf)
        for number, segment, here in _spans(piece):
            if job.used[segment.index]:
                hyper = job.hypers[segment.group]
                found[:, number] = lamb(
                    new[here],
                    states["exp_avg"][here],
                    states["fresh"][here],
                    states["exp_avg_sq"][here],
                    master[here],
                    betas=hyper.betas,
                    eps=hyper.eps,
                    weight_decay=hyper.weight_decay,
                    least=leasts[number],
                )
        if not self._whole:
            yield from self._of_all_parts(found)
        norms = found[:2].sqrt()
        return states["coefficient"] * self._ratio(piece, states, job, found[2], norms[0], norms[1])

    def _of_all_parts(self, found: Tensor) -> Iterator[None]:
        """Sums, and the least, of what ranks found in their parts, in place."""
        transport = self._ctx.transport
        every = found.new_empty(transport.world * found.numel())
        handle = transport.all_gather(every, found.view(-1), channel="rule", purpose="rule")
        yield
        handle.wait()
        parts = every.view(transport.world, *found.shape)
        torch.sum(parts[:, :2], 0, out=found[:2])
        torch.amin(parts[:, 2], 0, out=found[2])

    def _move(
        self, piece: Piece, states: Mapping[str, Tensor], job: Job, size: Tensor, master: Tensor, param: Tensor | None
    ) -> None:
        """Weights go by the rate times the size of a parameter's step, along its momentum and its decay."""
        sizes = size.tolist()
        for number, segment, here in _spans(piece):
            if job.used[segment.index]:
                hyper = job.hypers[segment.group]
                sgd(
                    states["exp_avg"][here],
                    master[here],
                    None,
                    None if param is None else param[here],
                    lr=hyper.lr * sizes[number],
                    weight_decay=hyper.weight_decay,
                    step=job.steps[segment.index],
                )

    def _ratio(
        self, piece: Piece, states: Mapping[str, Tensor], job: Job, least: Tensor, means: Tensor, steps: Tensor
    ) -> Tensor:
        """Factors on each parameter's coefficient [parameters of the flat one], kept in `ratio` where it is used.

        The largest of frozen over fresh root variances, the less of it the more of the step is the weight's decay;
        within bounds, and near what it was.
        """
        options, last = self._options, states["ratio"]
        found = 1 / least
        share = torch.where(steps > 0, (means / steps).clamp(max=1.0), 1.0)
        found.mul_(share).add_(1 - share).clamp_(options.factor_min, options.factor_max)
        found = found.maximum(last * (1 - options.factor_threshold)).minimum(last * (1 + options.factor_threshold))
        return last.copy_(torch.where(_used(piece, job, last), found, last))

    def _norms(self, piece: Piece, *values: Tensor) -> Generator[None, None, tuple[Tensor, ...]]:
        """Of each parameter of a flat one, of each of the values over a piece: [parameters]."""
        dtype = values[0].dtype
        sums = torch.zeros(len(values), len(piece.shard.flat.segments), dtype=dtype, device=values[0].device)
        for number, _, here in _spans(piece):
            for row, value in zip(sums, values, strict=True):
                row[number] = squares(value[here])
        if not self._whole:
            handle = self._ctx.transport.all_reduce(sums, "sum", channel="rule", purpose="rule")
            yield
            handle.wait()
        return tuple(sums.sqrt_().unbind())

    def _sized(self, piece: Piece, step: Tensor, size: Tensor) -> Tensor:
        for number, _, here in _spans(piece):
            step[here].mul_(size[number])
        return step

    def _go(self, piece: Piece, states: Mapping[str, Tensor], job: Job, step: Tensor) -> None:
        """Weights go by the rate times a step."""
        copied = separate(states)
        for run in piece.runs(job):
            accumulate(states["master"][run.where], step[run.where], run.hyper.lr)
            if copied:
                states["param"][run.where].copy_(states["master"][run.where])


def _spans(piece: Piece) -> Iterator[tuple[int, Segment, slice]]:
    """Parameters in a piece: their numbers in the flat one, and where in the piece they are."""
    for number, segment in piece.places():
        yield (
            number,
            segment,
            slice(max(segment.start, piece.start) - piece.start, min(segment.stop, piece.stop) - piece.start),
        )


def _used(piece: Piece, job: Job, like: Tensor) -> Tensor:
    """bool [parameters of the flat one]."""
    return torch.tensor([job.used[segment.index] for segment in piece.shard.flat.segments], device=like.device)


descriptor = Descriptor(
    name="onebit_lamb",
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
    summary="LAMB that sends one bit an element once the variance has settled",
    notes=lambda options, steps: notes(options.freeze, options.betas[1], steps),
)


@hook
def dsx_optimize(options: Options, plan: Plan) -> list[Part]:
    return [Part("rule", lambda ctx: OneBitLamb(options, plan), OneBitLamb.bind)]
