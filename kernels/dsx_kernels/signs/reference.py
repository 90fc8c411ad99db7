"""The definition of `signs`."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx_kernels.signs.layout import LANES


def signs(value: Tensor, error: Tensor, counts: Tensor, bits: Tensor, scales: Tensor) -> None:
    if counts.numel() == 0:
        return
    blocks, wide = counts.numel(), scales.dtype
    sums = (value.to(wide) + error.to(wide)).view(blocks, -1)
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
