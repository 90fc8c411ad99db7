"""Plugin `sgd`: stochastic gradient descent, with momentum (Sutskever et al. 2013) by torch's fused kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Hyper, State, ViewRule
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Part, hook, non_negative


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


class SGD(ViewRule):
    """The same bits as `torch.optim.SGD(fused=True)` on the same parameters."""

    def __init__(self, options: Options) -> None:
        self._nesterov, self._maximize = options.nesterov, options.maximize
        self.states = [State("momentum_buffer")] if options.momentum else []
        self.hyper = Hyper(
            lr=options.lr,
            momentum=options.momentum,
            dampening=options.dampening,
            weight_decay=options.weight_decay,
        )

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


def _refuse_group_momentum(rule: SGD, ctx: Context) -> None:
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
    fills={"rule": Fill(offers={"rule.silent", "rule.elementwise"})},
    summary="stochastic gradient descent, torch's fused kernel",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("rule", lambda ctx: SGD(options), bind=_refuse_group_momentum)]
