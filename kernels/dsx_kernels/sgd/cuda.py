"""`sgd` by cuda.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dsx_kernels.cuda_launch import on_slices
from dsx_kernels.sgd.scalars import scalars

SOURCE = Path(__file__).with_name("cuda.cu")


def sgd(
    gradient: Tensor,
    master: Tensor,
    momentum_buffer: Tensor | None,
    param: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    step: int,
    maximize: bool,
    multiplier: float,
    clip_value: float | None,
) -> None:
    values = scalars(lr, momentum, dampening, weight_decay, step, maximize, multiplier, clip_value)
    tensors = (gradient, master, momentum_buffer, param)
    on_slices(SOURCE, "sgd", tensors, *values, constants=("true" if nesterov else "false",))
