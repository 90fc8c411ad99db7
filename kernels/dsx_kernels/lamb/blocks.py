"""What implementations of `lamb` have in common: numbers for each block of elements, and what becomes of those."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, LANES = 4096, 64
"""Elements of a block, and how many sums of them are made at the same time: those of native.cpp and cuda.cu."""


def room(tensor: Tensor) -> Tensor:
    """fp64 [3, blocks] for a slice, on its device."""
    return torch.empty(3, -(-tensor.numel() // BLOCK), dtype=torch.float64, device=tensor.device)


def numbers(
    betas: tuple[float, float], eps: float, weight_decay: float, least: float
) -> tuple[float, float, float, float, float, float]:
    """Options as kernels take them."""
    return 1 / (1 - betas[0]), betas[1], 1 - betas[1], weight_decay, least, eps


def total(found: Tensor, dtype: torch.dtype) -> Tensor:
    """[3] of [3, blocks]."""
    if not found.shape[1]:
        return torch.tensor([0.0, 0.0, torch.inf], dtype=dtype, device=found.device)
    return torch.stack([found[0].sum(), found[1].sum(), found[2].amin()]).to(dtype)
