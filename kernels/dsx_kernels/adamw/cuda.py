"""`adamw` by cuda.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dsx_kernels.adamw.scalars import scalars
from dsx_kernels.cuda_launch import on_slices

SOURCE = Path(__file__).with_name("cuda.cu")


def adamw(
    gradient: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    param: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
    multiplier: float,
    clip_value: float | None,
) -> None:
    values = scalars(lr, betas, eps, weight_decay, step, maximize, multiplier, clip_value)
    on_slices(SOURCE, "adamw", (gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, param), *values)
