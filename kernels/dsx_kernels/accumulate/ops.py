"""`accumulate`: a slice gets another added, times a number."""

from __future__ import annotations

from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.check import same_slices
from dsx_kernels.choice import Implementation, Operation

OPERATION = Operation(
    "accumulate",
    Implementation("native", "dsx_kernels.accumulate.native:accumulate", devices=("cpu",), missing=library.missing),
    Implementation(
        "triton", "dsx_kernels.accumulate.triton_accumulate:accumulate", devices=("cuda",), missing=needs.triton
    ),
    Implementation("cuda", "dsx_kernels.accumulate.cuda:accumulate", devices=("cuda",), missing=needs.cupy),
    Implementation("reference", "dsx_kernels.accumulate.reference:accumulate"),
)


def accumulate(into: Tensor, source: Tensor, scale: float = 1.0) -> None:
    """`into += source * scale`, in place.

    into    [n], usually fp32; computes in fp64 if it is, else in fp32
    source  [n]
    scale   is rounded to that dtype first

    Each fp32, bf16, fp16 or fp64, contiguous, on one device; what is written is rounded to nearest even. `ValueError`
    for tensors that do not fit together, `KernelUnavailable` for other dtypes.
    """
    same_slices("accumulate", into, source=source)
    OPERATION.pick(into.device, into.dtype)(into, source, scale)
