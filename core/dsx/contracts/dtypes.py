"""Role `dtypes`: in which dtype everything lives. One filler."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """fp32 for 16-bit dtypes, `dtype` for fp32 and fp64."""
    return torch.promote_types(dtype, torch.float32)


class Dtypes:
    """The null part: every parameter keeps the dtype it was built in, and arguments reach the model untouched."""

    def param(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which the parameter `name`, built in `dtype`, lives and computes."""
        return dtype

    def master(self, dtype: torch.dtype, source: torch.dtype) -> torch.dtype:
        """Dtype of the authoritative weight of a parameter that lives in `dtype` and was built in `source`.

        Where it differs from `dtype` a state `master` of its own is kept, made from the exact weights before rounding.
        """
        return dtype

    def accumulate(self, dtype: torch.dtype, accumulation: int) -> torch.dtype:
        """Dtype in which gradients of parameters in `dtype` add up over `accumulation` micro-batches.

        Sums over micro-batches are kept in at least fp32: in bf16, two of them put a weight off by up to 1.9e-2 in 6
        steps.
        """
        return at_least_fp32(dtype) if accumulation > 1 else dtype

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's forward on the root's inputs, cast as this precision wants them."""
        return model(*args, **kwargs)

    def backward(self) -> AbstractContextManager[object]:
        """What surrounds a backward: recomputation of activations in it must do what `call` did."""
        return nullcontext()
