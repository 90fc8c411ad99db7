"""`lamb` by cuda.cu: three numbers for each block, then of those."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dsx_kernels import cuda_launch
from dsx_kernels.lamb import blocks

SOURCE = Path(__file__).with_name("cuda.cu")


def lamb(
    new: Tensor,
    mean: Tensor,
    fresh: Tensor,
    factor: Tensor,
    weights: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    least: float,
) -> Tensor:
    tensors, found = (new, mean, fresh, factor, weights), blocks.room(mean)
    aligned = "true" if all(map(cuda_launch.aligned, tensors)) else "false"
    threads = found.shape[1] * blocks.LANES * mean.itemsize // cuda_launch.ACCESS
    kernel = f"dsx::lamb<{cuda_launch.TYPES[mean.dtype]}, {aligned}>"
    each = blocks.numbers(betas, eps, weight_decay, least)
    cuda_launch.launch(
        SOURCE, kernel, threads, mean.device, *tensors, found, mean.numel(), found.shape[1], *map(float, each)
    )
    return blocks.total(found, mean.dtype)
