"""The definition of `signs_mean`."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx_kernels.signs.layout import LANES


def signs_mean(bits: Tensor, scales: Tensor, counts: Tensor, out: Tensor) -> None:
    if counts.numel() == 0:
        return
    blocks = counts.numel()
    places = torch.arange(LANES, device=out.device)[:, None]
    total = torch.zeros(blocks, out.numel() // blocks, dtype=scales.dtype, device=out.device)
    for words, scale in zip(bits, scales, strict=True):  # in rank order
        negative = ((words.view(-1, 1, LANES) >> places) & 1).view(blocks, -1).bool()
        total += torch.where(negative, -scale[:, None], scale[:, None])
    inside = torch.arange(total.shape[1], device=out.device) < counts[:, None]
    out.copy_(torch.where(inside, (total / len(bits)).to(out.dtype), out.view(blocks, -1)).view(-1))
