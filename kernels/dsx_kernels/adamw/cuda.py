"""`adamw` by cuda.cu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dsx_kernels.adamw.scalars import scalars
from dsx_kernels.cuda_launch import on_slices

SOURCE = Path(__file__).with_name("cuda.cu")


def adamw(*tensors: Tensor | None, **numbers: Any) -> None:
    """`tensors` and `numbers` are those of `ops.adamw`, in its order."""
    on_slices(SOURCE, "adamw", tensors, *scalars(**numbers))
