"""`signs` by cuda.cu."""

from __future__ import annotations

from math import inf
from pathlib import Path

from torch import Tensor

from dsx_kernels import cuda_launch
from dsx_kernels.signs.layout import LANES

SOURCE = Path(__file__).with_name("cuda.cu")


def signs(
    value: Tensor | None,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    gradient: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    beta: float = 0.0,
    multiplier: float = 1.0,
    clip_value: float | None = None,
) -> None:
    blocks = counts.numel()
    if blocks:
        slices = (value, error, scales, gradient, factor)
        types = [cuda_launch.NONE if tensor is None else cuda_launch.TYPES[tensor.dtype] for tensor in slices]
        tensors = (value, error, counts, bits, scales, gradient, factor)
        share = (multiplier, inf if clip_value is None else clip_value, 1 - beta)
        numbers = (blocks, error.numel() // blocks, *map(float, share))
        kernel = f"dsx::signs<{', '.join(types)}>"
        cuda_launch.launch(SOURCE, kernel, blocks * LANES, error.device, *tensors, *numbers)
