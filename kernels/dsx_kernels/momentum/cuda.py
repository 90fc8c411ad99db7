"""`momentum` by cuda.cu."""

from __future__ import annotations

from math import inf
from pathlib import Path

from torch import Tensor

from dsx_kernels.cuda_launch import on_slices

SOURCE = Path(__file__).with_name("cuda.cu")


def momentum(
    mean: Tensor, gradient: Tensor, factor: Tensor | None, *, beta: float, multiplier: float, clip_value: float | None
) -> None:
    limit = inf if clip_value is None else clip_value
    on_slices(SOURCE, "momentum", (mean, gradient, factor), multiplier, limit, 1 - beta)
