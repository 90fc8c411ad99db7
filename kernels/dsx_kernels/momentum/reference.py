"""The definition of `momentum`."""

from __future__ import annotations

import torch
from torch import Tensor


def momentum(
    mean: Tensor, gradient: Tensor, factor: Tensor | None, *, beta: float, multiplier: float, clip_value: float | None
) -> None:
    wide = torch.float64 if mean.dtype == torch.float64 else torch.float32
    grad = gradient.to(wide) * multiplier
    if clip_value is not None:
        grad = grad.clamp(-clip_value, clip_value)
    if factor is not None:
        grad = grad * factor.to(wide)
    mean.copy_(mean.to(wide) + (1 - beta) * (grad - mean.to(wide)))
