"""`accumulate` by cuda.cu."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from dsx_kernels.cuda_launch import on_slices

SOURCE = Path(__file__).with_name("cuda.cu")


def accumulate(into: Tensor, source: Tensor, scale: float) -> None:
    on_slices(SOURCE, "accumulate", (into, source), scale)
