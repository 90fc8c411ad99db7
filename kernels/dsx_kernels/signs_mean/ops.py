"""`signs_mean`: the mean of what ranks sent as signs and scales."""

from __future__ import annotations

from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.choice import Implementation, Operation
from dsx_kernels.signs.layout import check

OPERATION = Operation(
    "signs_mean",
    Implementation("native", "dsx_kernels.signs_mean.native:signs_mean", devices=("cpu",), missing=library.missing),
    Implementation(
        "triton", "dsx_kernels.signs_mean.triton_signs_mean:signs_mean", devices=("cuda",), missing=needs.triton
    ),
    Implementation("cuda", "dsx_kernels.signs_mean.cuda:signs_mean", devices=("cuda",), missing=needs.cupy),
    Implementation("reference", "dsx_kernels.signs_mean.reference:signs_mean"),
)


def signs_mean(bits: Tensor, scales: Tensor, counts: Tensor, out: Tensor) -> None:
    """Decompress what `signs` made on each rank, add it up in rank order, and divide by the number of ranks.

    bits    int32 [ranks, n / 32], the layout of `signs`; rows may lie apart
    scales  [ranks, blocks], fp64 or fp32, in which it is computed; rows may lie apart
    counts  int32 [blocks]: elements of a block after the first so many are not written
    out     [n], written; fp32, bf16, fp16 or fp64, contiguous, rounded to nearest even

    All on one device. `ValueError` for tensors that do not fit together, `KernelUnavailable` for other dtypes.
    """
    check("signs_mean", out, counts, bits, scales, bits.shape[0])
    OPERATION.pick(out.device, out.dtype)(bits, scales, counts, out)
