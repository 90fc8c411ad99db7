"""Functions in a module of their own, which models of tests call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_of_products(q: Tensor, k: Tensor, v: Tensor, **choices: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **choices)


def by_way_of_another(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.relu(softmax_of_products(q, k, v, is_causal=True))
