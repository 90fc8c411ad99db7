"""The null rule: AdamW (Loshchilov & Hutter 2019, algorithm 2) by torch's fused kernel, with torch's defaults."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dsx.contracts import Hyper, State, ViewRule


class AdamW(ViewRule):
    """The same arithmetic, bit for bit, as `torch.optim.AdamW(fused=True)` on the same parameters."""

    states = (State("exp_avg"), State("exp_avg_sq"))
    hyper = Hyper(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)

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
            [],
            list(counts.unbind()),
            lr=hyper.lr,
            beta1=hyper.betas[0],
            beta2=hyper.betas[1],
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            amsgrad=False,
            maximize=False,
        )
