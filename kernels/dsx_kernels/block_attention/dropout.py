"""Which pairs dropout keeps: a hash of seed, head and positions, the same in every pass and implementation."""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def threshold(probability: float) -> int:
    """A pair is dropped if its hash is below this."""
    return min(int(probability * 2**32), MASK)


def keep(heads: int, queries: int, keys: int, probability: float, seed: int, device: torch.device) -> Tensor:
    """bool [heads, queries, keys], heads counted through the batch: True with probability 1 - `probability`.

    hash(seed, head, i, j) = mix(mix(mix(seed + head) + i) ^ 0x9e3779b9 j) in uint32, mix being the last step of
    MurmurHash3 (Appleby, public domain).
    """
    head = _mix(torch.arange(heads, device=device) + (seed & MASK))
    row = _mix(head[:, None] + torch.arange(queries, device=device))
    column = torch.arange(keys, device=device) * 0x9E3779B9 & MASK
    return _mix(row[:, :, None] ^ column) >= threshold(probability)


def _mix(x: Tensor) -> Tensor:
    x = x & MASK
    x = (x ^ x >> 16) * 0x85EBCA6B & MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & MASK
    return x ^ x >> 16
