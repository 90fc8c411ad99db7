"""The definition of `accumulate`."""

from __future__ import annotations

import torch
from torch import Tensor


def accumulate(into: Tensor, source: Tensor, scale: float) -> None:
    wide = torch.float64 if into.dtype == torch.float64 else torch.float32
    into.copy_(into.to(wide) + source.to(wide).view_as(into) * scale)
