"""`squares`: the sum of squares of a tensor, which also says whether it is finite."""

from __future__ import annotations

from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.choice import Implementation, Operation

OPERATION = Operation(
    "squares",
    Implementation("native", "dsx_kernels.squares.native:squares", devices=("cpu",), missing=library.missing),
    Implementation("triton", "dsx_kernels.squares.triton_squares:squares", devices=("cuda",), missing=needs.triton),
    Implementation("cuda", "dsx_kernels.squares.cuda:squares", devices=("cuda",), missing=needs.cupy),
    Implementation("reference", "dsx_kernels.squares.reference:squares"),
)


def squares(tensor: Tensor) -> Tensor:
    """Sum of the squares of all elements, in one read.

    tensor   any shape, fp32, bf16, fp16 or fp64, on any device
    returns  0-dim, fp32, or fp64 for fp64, on the same device; Inf or NaN if any element is, or if the sum is beyond
             the range of that dtype

    The bits do not depend on the number of threads. `KernelUnavailable` for other dtypes.
    """
    result: Tensor = OPERATION.pick(tensor.device, tensor.dtype)(tensor)
    return result
