"""Why Triton or CUDA kernels cannot run on this machine; neither triton nor cupy is imported to find out."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def triton() -> str | None:
    """Why there is no Triton kernel here; None if there can be."""
    if find_spec("triton") is None:
        return "needs triton, which is not installed: pip install 'dsx-engine[gpu]'"
    return None if torch.cuda.is_available() else "needs a GPU, and torch sees none"


@cache
def cupy() -> str | None:
    """Why there is no CUDA kernel here; None if there can be."""
    if find_spec("cupy") is None:
        return "needs cupy, which is not installed: pip install 'dsx-engine[gpu]'"
    if torch.version.cuda is None or not torch.cuda.is_available():
        return "needs an NVIDIA GPU, and torch sees none"
    return None
