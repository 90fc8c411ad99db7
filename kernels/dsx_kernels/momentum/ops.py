"""`momentum`: the mean of a gradient over time, in one pass."""

from __future__ import annotations

from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.check import same_slices
from dsx_kernels.choice import Implementation, Operation

OPERATION = Operation(
    "momentum",
    Implementation("native", "dsx_kernels.momentum.native:momentum", devices=("cpu",), missing=library.missing),
    Implementation("triton", "dsx_kernels.momentum.triton_momentum:momentum", devices=("cuda",), missing=needs.triton),
    Implementation("cuda", "dsx_kernels.momentum.cuda:momentum", devices=("cuda",), missing=needs.cupy),
    Implementation("reference", "dsx_kernels.momentum.reference:momentum"),
)


def momentum(
    mean: Tensor,
    gradient: Tensor,
    factor: Tensor | None = None,
    *,
    beta: float,
    multiplier: float = 1.0,
    clip_value: float | None = None,
) -> None:
    """`mean += (1 - beta) (factor clamp(gradient * multiplier, ± clip_value) - mean)`, in place.

    mean      [n], computes in fp64 if it is, else in fp32
    gradient  [n]
    factor    [n], of each element; None: 1

    Each tensor fp32, bf16, fp16 or fp64, contiguous, all on one device; what is written is rounded to nearest even. An
    element's bits depend on its own numbers only. `ValueError` for tensors that do not fit together,
    `KernelUnavailable` for other dtypes.
    """
    same_slices("momentum", mean, gradient=gradient, factor=factor)
    function = OPERATION.pick(mean.device, mean.dtype)
    function(mean, gradient, factor, beta=beta, multiplier=multiplier, clip_value=clip_value)
