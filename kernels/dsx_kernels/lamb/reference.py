"""The definition of `lamb`."""

from __future__ import annotations

import torch
from torch import Tensor


def lamb(
    new: Tensor,
    mean: Tensor,
    fresh: Tensor,
    factor: Tensor,
    weights: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    least: float,
) -> Tensor:
    wide = torch.float64 if mean.dtype == torch.float64 else torch.float32
    now, before, f = new.to(wide), mean.to(wide), factor.to(wide)
    gradient = before + (now - before) * (1 / (1 - betas[0]))
    variance = betas[1] * fresh.to(wide) + (1 - betas[1]) * gradient * gradient
    fresh.copy_(variance)
    mean.copy_(new)
    step = now + weight_decay * weights.to(wide)
    root = torch.maximum(variance, f * f * least).sqrt() + eps * f
    smallest = root.amin() if root.numel() else root.new_tensor(torch.inf)
    return torch.stack([now.square().sum(), step.square().sum(), smallest])
