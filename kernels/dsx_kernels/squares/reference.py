"""The definition of `squares`."""

from __future__ import annotations

import torch
from torch import Tensor


def squares(tensor: Tensor) -> Tensor:
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return tensor.to(wide).square().sum()
