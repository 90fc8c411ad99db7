"""Plugin `sgd`: stochastic gradient descent, with momentum (Sutskever et al. 2013), everything read and written
once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Hyper, Job, Piece, Rule, State, ViewRule
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Part, hook, non_negative
from dsx_kernels.sgd import sgd
from dsx_optimizers.served import served


@frozen(kw_only=True)
class Options:
    """`[optimize.sgd]`, with torch's names and defaults.

    lr            learning rate
    momentum      decay of the sum of gradients; 0 keeps none
    dampening     what the gradient's share in that sum is reduced by
    weight_decay  added to the gradient, times the weight
    nesterov      step along the gradient and the momentum of the next step; needs momentum, and no dampening
    maximize      climb instead of descend
    """

    lr: Annotated[float, non_negative] = 1e-3
    momentum: Annotated[float, non_negative] = 0.0
    dampening: float = 0.0
    weight_decay: Annotated[float, non_negative] = 0.0
    nesterov: bool = False
    maximize: bool = False

    def __attrs_post_init__(self) -> None:
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov = true needs momentum above 0 and dampening 0, here they are {self.momentum:g} and "
                f"{self.dampening:g}: give a momentum, for instance 0.9, or remove nesterov"
            )


class SGD(Rule):
    """The arithmetic of `torch.optim.SGD`, by a kernel of dsx: an element's last bits may be others than torch's."""

    def __init__(self, options: Options) -> None:
        self._nesterov, self._maximize = options.nesterov, options.maximize
        self.states, self.hyper = _states(options), _hyper(options)

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> None:
        copied = states["param"].data_ptr() != states["master"].data_ptr()
        for run in piece.runs(job):
            sgd(
                states["grad"][run.where],
                states["master"][run.where],
                states["momentum_buffer"][run.where] if self.states else None,
                states["param"][run.where] if copied else None,
                lr=run.hyper.lr,
                momentum=run.hyper.momentum,
                dampening=run.hyper.dampening,
                weight_decay=run.hyper.weight_decay,
                nesterov=self._nesterov,
                step=run.step,
                maximize=self._maximize,
                multiplier=job.multiplier,
                clip_value=run.hyper.get("clip_value"),
            )


class FusedSGD(ViewRule):
    """torch's fused kernel, for machines and devices that dsx has no kernel for."""

    def __init__(self, options: Options) -> None:
        self._nesterov, self._maximize = options.nesterov, options.maximize
        self.states, self.hyper = _states(options), _hyper(options)

    def apply(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        states: Mapping[str, list[Tensor]],
        steps: list[int],
        hyper: Hyper,
    ) -> None:
        buffers = states.get("momentum_buffer", [])
        # A parameter's first buffer is its gradient as it is, without dampening, whenever that comes.
        for first in (True, False):
            chosen = [number for number, step in enumerate(steps) if (step == 1) is first]
            if chosen:
                torch._fused_sgd_(
                    [weights[number] for number in chosen],
                    [grads[number] for number in chosen],
                    [buffers[number] for number in chosen] if buffers else [],
                    lr=hyper.lr,
                    momentum=hyper.momentum,
                    dampening=hyper.dampening,
                    weight_decay=hyper.weight_decay,
                    nesterov=self._nesterov,
                    maximize=self._maximize,
                    is_first_step=first,
                )


def _states(options: Options) -> list[State]:
    return [State("momentum_buffer")] if options.momentum else []


def _hyper(options: Options) -> Hyper:
    return Hyper(
        lr=options.lr,
        momentum=options.momentum,
        dampening=options.dampening,
        weight_decay=options.weight_decay,
    )


def _refuse_group_momentum(rule: Rule, ctx: Context) -> None:
    """Buffers exist for all groups or for none."""
    for name, hyper in ctx.groups.hypers(rule.hyper).items():
        if hyper.momentum and not rule.states:
            raise DsxError(
                f"the group '{name}' has momentum {hyper.momentum:g}, but sgd itself has none and keeps no buffers",
                where="[optimize.sgd] momentum",
                remedy="set a momentum there, and 0 in the groups that want none",
            )


descriptor = Descriptor(
    name="sgd",
    section="optimize",
    contract=1,
    options=Options,
    fills={"rule": Fill(offers={"rule.silent", "rule.elementwise", "rule.pieces"})},
    summary="stochastic gradient descent, in one pass over memory",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [
        Part(
            "rule",
            build=lambda ctx: (SGD if served("sgd", ctx.plan.device) else FusedSGD)(options),
            bind=_refuse_group_momentum,
        )
    ]
