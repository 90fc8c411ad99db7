"""`signs` by cuda.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dsx_kernels import cuda_launch
from dsx_kernels.signs.layout import LANES

SOURCE = Path(__file__).with_name("cuda.cu")


def signs(value: Tensor, error: Tensor, counts: Tensor, bits: Tensor, scales: Tensor) -> None:
    blocks = counts.numel()
    if blocks:
        kernel = f"dsx::signs<{', '.join(cuda_launch.TYPES[tensor.dtype] for tensor in (value, error, scales))}>"
        tensors = (value, error, counts, bits, scales)
        cuda_launch.launch(SOURCE, kernel, blocks * LANES, error.device, *tensors, blocks, error.numel() // blocks)
