"""Plugin `onebit_lamb`: LAMB whose momentum travels as signs once the variance of the gradients has settled (Li et al.
2022, arXiv 2104.06069, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Flat, Hyper, Job, Piece, State
from dsx.plugin import Descriptor, Fill, Need, Part, fraction, hook, non_negative, positive
from dsx_kernels.accumulate import accumulate
from dsx_kernels.adamw import adamw
from dsx_kernels.squares import squares
from dsx_onebit.freeze import factors
from dsx_onebit.phases import TwoPhases, notes, owned
from dsx_onebit.steps import GROUP, Rooms, add_gradient, check_block, separate

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

    states = (
        State("exp_avg"),
        State("exp_avg_sq"),
        State("fresh"),
        State("least", shape="segment"),
        State("coefficient", shape="segment"),
        State("ratio", shape="segment"),
        State("worker_error", scope="rank", resize="mean"),
        State("owner_error", scope="chunk"),
    )

    def __init__(self, options: Options) -> None:
        super().__init__(options.freeze, options.betas[1], options.block, "onebit_lamb")
        self._options = options
        self.hyper = Hyper(lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)
        self._rooms = Rooms()

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> None:
        if self._freeze.compresses(job.number):
            self._compressed(piece, states, job)
            return
        self._warm_up(piece, states, job)
        self._freeze.note(owned(piece, states["exp_avg_sq"]))
        if self._freeze.at == job.number:
            self._settle(piece.shard.flat, states, job)

    def _warm_up(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        """LAMB (You et al. 2020, arXiv 1904.00962, algorithm 2)."""
        step, master, options = self._rooms.like(states["master"]).zero_(), states["master"], self._options
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
        weights, steps = _norms(piece.shard.flat, master), _norms(piece.shard.flat, step)
        known = (weights > 0) & (steps > 0)
        size = torch.where(known, (weights / steps).clamp(options.min_coeff, options.max_coeff), 1.0)
        for number, segment in piece.places():
            if job.used[segment.index]:
                states["coefficient"][number].lerp_(size[number].to(step.dtype), 1 - options.coeff_beta)
        self._go(piece, states, job, step, size, 1.0)

    def _settle(self, flat: Flat, states: Mapping[str, Tensor], job: Job) -> None:
        """Turn the states into those of the compressed phase."""
        options, mean, factor = self._options, states["exp_avg"], states["exp_avg_sq"]
        looks = {segment.name: job.steps[segment.index] for segment in flat.segments}
        found = self._rooms.like(factor).zero_()
        states["least"].copy_(
            factors(flat, factor, looks, job.hypers, floor=options.floor, fallback=self._fallback, out=found)
        )
        factor.copy_(found)
        for number, segment in enumerate(flat.segments):
            where, hyper, updates = (
                slice(segment.start, segment.stop),
                job.hypers[segment.group],
                job.steps[segment.index],
            )
            states["fresh"][where] = (1 - hyper.eps * factor[where]).square_()  # the frozen one
            if updates:
                mean[where].mul_(factor[where]).div_(1 - hyper.betas[0] ** updates)
                states["coefficient"][number].div_(1 - options.coeff_beta**updates)
            else:
                states["coefficient"][number].fill_(min(max(1.0, options.min_coeff), options.max_coeff))
        states["ratio"].fill_(1)

    def _compressed(self, piece: Piece, states: Mapping[str, Tensor], job: Job) -> None:
        flat, mean, factor, exchange = piece.shard.flat, states["exp_avg"], states["exp_avg_sq"], self._exchange
        step = self._rooms.like(mean).copy_(mean)
        add_gradient(piece, states["grad"], step, factor, job)
        counts = exchange.counts(flat, job.used, mean.device)
        own = step[exchange.own(flat)]
        exchange.average(step, states["worker_error"], counts, out=own)
        exchange.spread(own, states["owner_error"], counts, out=step)
        for run in piece.runs(job):
            (one, two), here = run.hyper.betas, run.where
            gradient = mean[here].lerp_(step[here], 1 / (1 - one))  # of which the new momentum is made of the old
            states["fresh"][here].mul_(two).addcmul_(gradient, gradient, value=1 - two)
            mean[here].copy_(step[here])
            accumulate(step[here], states["master"][here], run.hyper.weight_decay)
        size = states["coefficient"] * self._ratio(piece, states, job, _norms(flat, mean), _norms(flat, step))
        self._go(piece, states, job, step, size, -1.0)

    def _ratio(self, piece: Piece, states: Mapping[str, Tensor], job: Job, means: Tensor, steps: Tensor) -> Tensor:
        """Factors on each parameter's coefficient [parameters of the flat one], kept in `ratio` where it is used.

        The largest of frozen over fresh root variances, the less of it the more of the step is the weight's decay;
        within bounds, and near what it was.
        """
        options, last = self._options, states["ratio"]
        found = last.clone()
        for number, segment in piece.places():
            if job.used[segment.index]:
                where, eps = slice(segment.start, segment.stop), job.hypers[segment.group].eps
                factor = states["exp_avg_sq"][where]
                floor = self._rooms.like(factor, "floor")
                torch.mul(factor, factor, out=floor).mul_(states["least"][number])
                torch.maximum(floor, states["fresh"][where], out=floor).sqrt_().add_(factor, alpha=eps)
                found[number] = 1 / floor.min()
        share = torch.where(steps > 0, (means / steps).clamp(max=1.0), 1.0).to(found.dtype)
        found.mul_(share).add_(1 - share).clamp_(options.factor_min, options.factor_max)
        found = found.maximum(last * (1 - options.factor_threshold)).minimum(last * (1 + options.factor_threshold))
        used = torch.tensor([job.used[segment.index] for segment in piece.shard.flat.segments], device=last.device)
        return last.copy_(torch.where(used, found, last))

    def _go(
        self, piece: Piece, states: Mapping[str, Tensor], job: Job, step: Tensor, size: Tensor, sign: float
    ) -> None:
        """Weights go by the rate, times each parameter's size, times a step, which is overwritten."""
        copied, size = separate(states), size.to(step.dtype)
        for number, segment in piece.places():
            step[segment.start : segment.stop].mul_(size[number])
        for run in piece.runs(job):
            accumulate(states["master"][run.where], step[run.where], sign * run.hyper.lr)
            if copied:
                states["param"][run.where].copy_(states["master"][run.where])


def _norms(flat: Flat, value: Tensor) -> Tensor:
    """Of each parameter of a flat one: [parameters]."""
    return torch.stack([squares(value[segment.start : segment.stop]) for segment in flat.segments]).sqrt_()


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
                Need("optimizer.whole", "how far a parameter goes is measured on all of it, on every rank"),
            ]
        )
    },
    summary="LAMB that sends one bit an element once the variance has settled",
    notes=lambda options, steps: notes(options.freeze, options.betas[1], steps),
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("rule", lambda ctx: OneBitLamb(options), OneBitLamb.bind)]
