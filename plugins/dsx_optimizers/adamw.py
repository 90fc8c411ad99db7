"""Plugin `adamw`: AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2), everything read and written once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Hyper, Job, Piece, Rule, State, ViewRule
from dsx.plugin import Descriptor, Fill, Part, fraction, hook, non_negative
from dsx_kernels.adamw import adamw
from dsx_optimizers.served import served

Beta = Annotated[float, fraction]


@frozen(kw_only=True)
class Options:
    """`[optimize.adamw]`, with torch's names and defaults.

    lr            learning rate
    betas         decay of the means of the gradient and of its square
    eps           added to the root of the mean square
    weight_decay  decoupled: each update takes lr * weight_decay of a weight off it
    amsgrad       divide by the largest mean square so far (Reddi et al. 2018, arXiv 1904.09237)
    maximize      climb instead of descend
    """

    lr: Annotated[float, non_negative] = 1e-3
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: Annotated[float, non_negative] = 1e-8
    weight_decay: Annotated[float, non_negative] = 1e-2
    amsgrad: bool = False
    maximize: bool = False


class AdamW(Rule):
    """The arithmetic of `torch.optim.AdamW`, by a kernel of dsx: an element's last bits may be others than torch's."""

    def __init__(self, options: Options) -> None:
        self._maximize = options.maximize
        self.states, self.hyper = _states(options), _hyper(options)

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> None:
        copied = states["param"].data_ptr() != states["master"].data_ptr()
        for run in piece.runs(job):
            here = {
                name: states[name][run.where] for name in ("grad", "master", *(state.name for state in self.states))
            }
            adamw(
                here["grad"],
                here["master"],
                here["exp_avg"],
                here["exp_avg_sq"],
                here.get("max_exp_avg_sq"),
                states["param"][run.where] if copied else None,
                lr=run.hyper.lr,
                betas=run.hyper.betas,
                eps=run.hyper.eps,
                weight_decay=run.hyper.weight_decay,
                step=run.step,
                maximize=self._maximize,
                multiplier=job.multiplier,
                clip_value=run.hyper.get("clip_value"),
            )


class FusedAdamW(ViewRule):
    """torch's fused kernel, for machines and devices that dsx has no kernel for."""

    def __init__(self, options: Options) -> None:
        self._amsgrad, self._maximize = options.amsgrad, options.maximize
        self.states, self.hyper = _states(options), _hyper(options)

    def apply(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        states: Mapping[str, list[Tensor]],
        steps: list[int],
        hyper: Hyper,
    ) -> None:
        counts = torch.tensor(steps, dtype=torch.float32).to(weights[0].device, non_blocking=True)
        torch._fused_adamw_(
            weights,
            grads,
            states["exp_avg"],
            states["exp_avg_sq"],
            states.get("max_exp_avg_sq", []),
            list(counts.unbind()),
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=self._amsgrad,
            maximize=self._maximize,
        )


def _states(options: Options) -> list[State]:
    most = [State("max_exp_avg_sq")] if options.amsgrad else []
    return [State("exp_avg"), State("exp_avg_sq"), *most]


def _hyper(options: Options) -> Hyper:
    return Hyper(lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay)


descriptor = Descriptor(
    name="adamw",
    section="optimize",
    contract=1,
    options=Options,
    fills={"rule": Fill(offers={"rule.silent", "rule.elementwise", "rule.pieces"})},
    summary="AdamW, in one pass over memory",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [Part("rule", lambda ctx: (AdamW if served("adamw", ctx.plan.device) else FusedAdamW)(options))]
