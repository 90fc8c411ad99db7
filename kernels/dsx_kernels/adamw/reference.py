"""The definition of `adamw`."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw(
    gradient: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    param: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
    multiplier: float,
    clip_value: float | None,
) -> None:
    wide = torch.float64 if master.dtype == torch.float64 else torch.float32
    grad = gradient.to(wide) * multiplier
    if clip_value is not None:
        grad = grad.clamp(-clip_value, clip_value)
    if maximize:
        grad = -grad

    mean = exp_avg.to(wide) + (1 - betas[0]) * (grad - exp_avg.to(wide))
    square = betas[1] * exp_avg_sq.to(wide) + (1 - betas[1]) * grad * grad
    exp_avg.copy_(mean)
    exp_avg_sq.copy_(square)
    if max_exp_avg_sq is not None:
        square = torch.maximum(max_exp_avg_sq.to(wide), square)
        max_exp_avg_sq.copy_(square)

    mean = mean / (1 - betas[0] ** step)
    square = square / (1 - betas[1] ** step)
    weight = (1 - lr * weight_decay) * master.to(wide) - lr * mean / (square.sqrt() + eps)
    master.copy_(weight)
    if param is not None:
        param.copy_(weight)
