"""`signs`: a slice plus what was left of the last time, as signs and scales; what is left now."""

from __future__ import annotations

from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.check import same_slices
from dsx_kernels.choice import Implementation, Operation
from dsx_kernels.signs.layout import check

OPERATION = Operation(
    "signs",
    Implementation("native", "dsx_kernels.signs.native:signs", devices=("cpu",), missing=library.missing),
    Implementation("triton", "dsx_kernels.signs.triton_signs:signs", devices=("cuda",), missing=needs.triton),
    Implementation("cuda", "dsx_kernels.signs.cuda:signs", devices=("cuda",), missing=needs.cupy),
    Implementation("reference", "dsx_kernels.signs.reference:signs"),
)


def signs(value: Tensor, error: Tensor, counts: Tensor, bits: Tensor, scales: Tensor) -> None:
    """Compress `value + error` to signs with one scale for each block, and keep the difference in `error`.

    value   [n]; may be `error` itself nowhere
    error   [n], read and written: value + error - (± scale), the error feedback (Seide et al. 2014)
    counts  int32 [blocks]: of a block's n / blocks elements, a multiple of 1,024, the first so many count; the others
            are neither read nor written, and their bits are 0
    bits    int32 [n / 32], written: bit b of word j of a group of 1,024 elements is set where element 32 b + j of the
            group is below zero; zeros of either sign are not
    scales  [blocks], written: mean of the absolute values that count, 0 where none does; fp64 or fp32, in which it is
            computed

    Value and error fp32, bf16, fp16 or fp64, contiguous, all on one device. A block's numbers depend on nothing outside
    it. An element that is not finite makes its block's scale so. `ValueError` for tensors that do not fit together,
    `KernelUnavailable` for other dtypes.
    """
    same_slices("signs", error, value=value)
    check("signs", error, counts, bits, scales, None)
    OPERATION.pick(error.device, error.dtype)(value, error, counts, bits, scales)
