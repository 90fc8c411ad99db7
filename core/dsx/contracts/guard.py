"""Role `guard`: looks at each final gradient once. One filler."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx.contracts.dtypes import at_least_fp32

CHUNK = 1 << 20


class Guard:
    """The null part: torch's own reduction.

    The number is the flag: Inf or NaN in any element makes the sum of squares Inf or NaN, so one read gives both the
    norm and whether the gradient is finite.
    """

    def squares(self, gradient: Tensor) -> Tensor:
        """Sum of squares of a raw (scaled) gradient.

        gradient  [n], any floating dtype
        returns   0-dim, fp32, or fp64 for an fp64 gradient
        """
        dtype = at_least_fp32(gradient.dtype)
        if gradient.dtype == dtype:
            return _squared_norm(gradient)
        # torch's norm of a 16-bit tensor is 14 times slower than that of an fp32 one on CPUs, conversion by pieces is
        # not
        parts = [_squared_norm(gradient[at : at + CHUNK].to(dtype)) for at in range(0, gradient.numel(), CHUNK)]
        return torch.stack(parts).sum() if parts else gradient.new_zeros((), dtype=dtype)


def _squared_norm(values: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values)
    return norm.square()
