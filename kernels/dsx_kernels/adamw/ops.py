"""`adamw`: one update of flat slices, everything read and written once."""

from __future__ import annotations

from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.check import same_slices
from dsx_kernels.choice import Implementation, Operation

OPERATION = Operation(
    "adamw",
    Implementation("native", "dsx_kernels.adamw.native:adamw", devices=("cpu",), missing=library.missing),
    Implementation("triton", "dsx_kernels.adamw.triton_adamw:adamw", devices=("cuda",), missing=needs.triton),
    Implementation("cuda", "dsx_kernels.adamw.cuda:adamw", devices=("cuda",), missing=needs.cupy),
    Implementation("reference", "dsx_kernels.adamw.reference:adamw"),
)


def adamw(
    gradient: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None = None,
    param: Tensor | None = None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool = False,
    multiplier: float = 1.0,
    clip_value: float | None = None,
) -> None:
    """AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101, algorithm 2), in place.

    gradient        [n], read as `clamp(gradient * multiplier, ± clip_value)`
    master          [n], the weights; computes in fp64 if it is, else in fp32
    exp_avg         [n], mean of the gradient
    exp_avg_sq      [n], mean of its square
    max_exp_avg_sq  [n], amsgrad (Reddi et al. 2018, arXiv 1904.09237): the largest mean square so far, by which it then
                    divides
    param           [n], a copy of the weights in another dtype, written in the same pass
    step            number of this update, from 1
    maximize        climb instead of descend

    Each tensor fp32, bf16, fp16 or fp64, contiguous, all on one device; what is written is rounded to nearest even. An
    element's bits depend on its own numbers only. `ValueError` for tensors that do not fit together,
    `KernelUnavailable` for other dtypes.
    """
    same_slices(
        "adamw",
        master,
        gradient=gradient,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        max_exp_avg_sq=max_exp_avg_sq,
        param=param,
    )
    OPERATION.pick(master.device, master.dtype)(
        gradient,
        master,
        exp_avg,
        exp_avg_sq,
        max_exp_avg_sq,
        param,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        maximize=maximize,
        multiplier=multiplier,
        clip_value=clip_value,
    )
