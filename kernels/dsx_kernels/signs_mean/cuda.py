"""`signs_mean` by cuda.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dsx_kernels import cuda_launch
from dsx_kernels.signs.layout import LANES

SOURCE = Path(__file__).with_name("cuda.cu")


def signs_mean(bits: Tensor, scales: Tensor, counts: Tensor, out: Tensor) -> None:
    blocks = counts.numel()
    if blocks:
        kernel = f"dsx::signs_mean<{cuda_launch.TYPES[scales.dtype]}, {cuda_launch.TYPES[out.dtype]}>"
        sizes = (len(bits), bits.stride(0), scales.stride(0), blocks, out.numel() // blocks)
        cuda_launch.launch(SOURCE, kernel, out.numel() // LANES, out.device, bits, scales, counts, out, *sizes)
