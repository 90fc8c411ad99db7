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


def signs(
    value: Tensor | None,
    error: Tensor,
    counts: Tensor,
    bits: Tensor,
    scales: Tensor,
    gradient: Tensor | None = None,
    factor: Tensor | None = None,
    *,
    beta: float = 0.0,
    multiplier: float = 1.0,
    clip_value: float | None = None,
) -> None:
    """Compress `value + error` to signs with one scale for each block, and keep the difference in `error`.

    value     [n]; may be `error` itself nowhere; None: the gradient's share alone
    error     [n], read and written: value + error - (± scale), the error feedback (Seide et al. 2014)
    counts    int32 [blocks]: of a block's n / blocks elements, a multiple of 1,024, the first so many count; the others
              are neither read nor written, and their bits are 0
    bits      int32 [n / 32], written: bit b of word j of a group of 1,024 elements is set where element 32 b + j of the
              group is below zero; zeros of either sign are not
    scales    [blocks], written: mean of the absolute values that count, 0 where none does; fp64 or fp32, in which it is
              computed
    gradient  [n], whose share is first added to the value as `momentum` adds it, but nowhere written:
              value + (1 - beta) (g - value), or g where there is no value, of
              g = factor clamp(gradient * multiplier, ± clip_value)
    factor    [n], of each element; None: 1

    Slices fp32, bf16, fp16 or fp64, contiguous, all on one device. A block's numbers depend on nothing outside it. An
    element that is not finite makes its block's scale so. `ValueError` for tensors that do not fit together or where
    neither a value nor a gradient is given, `KernelUnavailable` for other dtypes.
    """
    if value is None and gradient is None:
        raise ValueError("signs: of what? give a value, a gradient, or both")
    same_slices("signs", error, value=value, gradient=gradient, factor=factor)
    check("signs", error, counts, bits, scales, None)
    function = OPERATION.pick(error.device, error.dtype)
    share = {"beta": beta, "multiplier": multiplier, "clip_value": clip_value}
    function(value, error, counts, bits, scales, gradient, factor, **share)
