"""The definition of `signs`."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx_kernels.signs.layout import LANES


def signs(
    value: Tensor | None,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    gradient: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    beta: float = 0.0,
    multiplier: float = 1.0,
    clip_value: float | None = None,
) -> None:
    if counts.numel() == 0:
        return
    blocks, wide = counts.numel(), scales.dtype
    added = None if value is None else value.to(wide)
    if gradient is not None:
        grad = gradient.to(wide) * multiplier
        if clip_value is not None:
            grad = grad.clamp(-clip_value, clip_value)
        if factor is not None:
            grad = grad * factor.to(wide)
        added = grad if added is None else added + (1 - beta) * (grad - added)
    assert added is not None
    sums = (added + error.to(wide)).view(blocks, -1)
    inside = torch.arange(sums.shape[1], device=sums.device) < counts[:, None]
    sums = torch.where(inside, sums, 0.0)

    scale = sums.abs().sum(1, keepdim=True, dtype=torch.float64) / counts[:, None].clamp(min=1)
    scales.copy_(scale[:, 0])
    scale = scale.to(wide)
    negative = sums < 0  # zeros of either sign, and what is not a number, count as positive
    error.copy_(torch.where(inside, sums - torch.where(negative, -scale, scale), error.view(blocks, -1)).view(-1))

    places = torch.arange(LANES, device=sums.device)[:, None]
    words = (negative.view(-1, LANES, LANES).long() << places).sum(1)
    bits.copy_((words - ((words >> 31) << 32)).view(-1))
