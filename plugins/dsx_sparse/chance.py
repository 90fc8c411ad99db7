"""Random blocks: by a seed alone, so that every rank, and every run, draws the same."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(count: int, each: int, heads: int, seed: int, causal: bool) -> Tensor:
    """`each` different key blocks for each head and query block, or all there are: bool [heads, count, count].

    causal  out of those up to the query's own
    """
    generator = torch.Generator().manual_seed(seed)
    lots = torch.rand(heads, count, count, generator=generator)
    if causal:
        lots.masked_fill_(torch.ones(count, count, dtype=torch.bool).triu(1), -1.0)
    best = lots.topk(min(each, count), dim=-1)
    return torch.zeros(heads, count, count, dtype=torch.bool).scatter_(2, best.indices, best.values >= 0)
