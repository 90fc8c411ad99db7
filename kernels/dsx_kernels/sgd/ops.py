"""`sgd`: one update of flat slices, everything read and written once."""

from __future__ import annotations

from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.check import same_slices
from dsx_kernels.choice import Implementation, Operation

OPERATION = Operation(
    "sgd",
    Implementation("native", "dsx_kernels.sgd.native:sgd", devices=("cpu",), missing=library.missing),
    Implementation("triton", "dsx_kernels.sgd.triton_sgd:sgd", devices=("cuda",), missing=needs.triton),
    Implementation("cuda", "dsx_kernels.sgd.cuda:sgd", devices=("cuda",), missing=needs.cupy),
    Implementation("reference", "dsx_kernels.sgd.reference:sgd"),
)


def sgd(
    gradient: Tensor,
    master: Tensor,
    momentum_buffer: Tensor | None = None,
    param: Tensor | None = None,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    step: int,
    maximize: bool = False,
    multiplier: float = 1.0,
    clip_value: float | None = None,
) -> None:
    """Stochastic gradient descent with momentum (Sutskever et al. 2013), in place, as torch.optim.SGD defines it.

    gradient         [n], read as `clamp(gradient * multiplier, ± clip_value)`
    master           [n], the weights; computes in fp64 if it is, else in fp32
    momentum_buffer  [n], the decaying sum of gradients; without it there is no momentum
    param            [n], a copy of the weights in another dtype, written in the same pass
    dampening        what the gradient's share in the sum is reduced by
    weight_decay     added to the gradient, times the weight
    nesterov         step along the gradient and the momentum of the next step
    step             number of this update, from 1: the first makes the buffer the gradient, without dampening
    maximize         climb instead of descend

    Each tensor fp32, bf16, fp16 or fp64, contiguous, all on one device; what is written is rounded to nearest even. An
    element's bits depend on its own numbers only. `ValueError` for tensors that do not fit together,
    `KernelUnavailable` for other dtypes.
    """
    same_slices("sgd", master, gradient=gradient, momentum_buffer=momentum_buffer, param=param)
    OPERATION.pick(master.device, master.dtype)(
        gradient,
        master,
        momentum_buffer,
        param,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        step=step,
        maximize=maximize,
        multiplier=multiplier,
        clip_value=clip_value,
    )
