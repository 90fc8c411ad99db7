"""`cast`: a slice in another floating dtype."""

from __future__ import annotations

from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.check import same_slices
from dsx_kernels.choice import Implementation, Operation

OPERATION = Operation(
    "cast",
    Implementation("native", "dsx_kernels.cast.native:cast", devices=("cpu",), missing=library.missing),
    Implementation("triton", "dsx_kernels.cast.triton_cast:cast", devices=("cuda",), missing=needs.triton),
    Implementation("cuda", "dsx_kernels.cast.cuda:cast", devices=("cuda",), missing=needs.cupy),
    Implementation("reference", "dsx_kernels.cast.reference:cast"),
)


def cast(source: Tensor, target: Tensor) -> None:
    """Write `source` into `target`, rounded to nearest even.

    source, target  [n] each, fp32, bf16, fp16 or fp64, contiguous, on one device

    Infinities and NaN stay what they are, and what is beyond the target's range becomes infinite. `ValueError` for
    tensors that do not fit together, `KernelUnavailable` for other dtypes.
    """
    same_slices("cast", source, target=target)
    OPERATION.pick(source.device, source.dtype)(source, target)
