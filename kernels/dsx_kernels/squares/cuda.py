"""`squares` by cuda.cu: a sum for each block, then the sum of those."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dsx_kernels import cuda_launch

SOURCE = Path(__file__).with_name("cuda.cu")
BLOCK, LANES = 4096, 64
"""Elements of a block, and how many sums of them are made at the same time: those of cuda.cu."""


def squares(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    blocks = -(-tensor.numel() // BLOCK)
    sums = torch.empty(blocks, dtype=torch.float64, device=tensor.device)
    threads = blocks * LANES * tensor.itemsize // cuda_launch.ACCESS
    aligned = "true" if cuda_launch.aligned(tensor) else "false"
    kernel = f"dsx::squares<{cuda_launch.TYPES[tensor.dtype]}, {aligned}>"
    cuda_launch.launch(SOURCE, kernel, threads, tensor.device, tensor, sums, tensor.numel())
    return sums.sum().to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)
