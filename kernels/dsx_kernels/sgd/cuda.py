"""`sgd` by cuda.cu."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from dsx_kernels.cuda_launch import on_slices
from dsx_kernels.sgd.scalars import scalars

SOURCE = Path(__file__).with_name("cuda.cu")


def sgd(*tensors: Tensor | None, nesterov: bool, **numbers: Any) -> None:
    """`tensors` and numbers are those of `ops.sgd`, in its order."""
    on_slices(SOURCE, "sgd", tensors, *scalars(**numbers), constants=("true" if nesterov else "false",))
