"""`lamb`: what LAMB with a frozen variance looks at when a parameter has a new momentum, in one pass."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.check import same_slices
from dsx_kernels.choice import Implementation, Operation

_DTYPES = (torch.float32, torch.float64)

OPERATION = Operation(
    "lamb",
    Implementation("native", "dsx_kernels.lamb.native:lamb", devices=("cpu",), dtypes=_DTYPES, missing=library.missing),
    Implementation("triton", "dsx_kernels.lamb.triton_lamb:lamb", ("cuda",), _DTYPES, missing=needs.triton),
    Implementation("cuda", "dsx_kernels.lamb.cuda:lamb", ("cuda",), _DTYPES, missing=needs.cupy),
    Implementation("reference", "dsx_kernels.lamb.reference:lamb"),
)


def lamb(
    new: Tensor,
    mean: Tensor,
    fresh: Tensor,
    factor: Tensor,
    weights: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    least: float,
) -> Tensor:
    """Bring a parameter's momentum and the variance of the gradients that it tells of up to date, and look at both (Li
    et al. 2022, arXiv 2104.06069, algorithm 1), in one pass.

    new           [n], the momentum that has arrived, over the root of the frozen variance
    mean          [n], the one before; becomes the new one
    fresh         [n], the variance of what they are means of; follows `mean + (new - mean) / (1 - betas[0])`
    factor        [n], 1 / (root of the frozen variance + eps)
    weights       [n]
    least         least variance, as the frozen one had it
    weight_decay  times the weights, is added to the momentum for the step
    returns       [3], on the same device: the sums of squares of the momentum and of the step, and the least of
                  `sqrt(max(fresh, factor² least)) + eps factor`, infinite for no elements

    All of one dtype (fp32 and fp64 by kernels, bf16 and fp16 by the reference, in fp32), contiguous, on one device. An
    element's bits depend on its own numbers only, those of the sums not on the number of threads. Numbers that are not
    finite have no defined result. `ValueError` for tensors that do not fit together, `KernelUnavailable` for other
    dtypes.
    """
    others = {"new": new, "fresh": fresh, "factor": factor, "weights": weights}
    same_slices("lamb", mean, **others)
    for name, tensor in others.items():
        if tensor.dtype != mean.dtype:
            raise ValueError(f"lamb: {name} is {tensor.dtype}, the first tensor {mean.dtype}")
    result: Tensor = OPERATION.pick(mean.device, mean.dtype)(
        new, mean, fresh, factor, weights, betas=betas, eps=eps, weight_decay=weight_decay, least=least
    )
    return result
