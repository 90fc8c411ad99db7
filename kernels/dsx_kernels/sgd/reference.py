"""The definition of `sgd`."""

from __future__ import annotations

import torch
from torch import Tensor


def sgd(
    gradient: Tensor,
    master: Tensor,
    momentum_buffer: Tensor | None,
    param: Tensor | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    step: int,
    maximize: bool,
    multiplier: float,
    clip_value: float | None,
) -> None:
    wide = torch.float64 if master.dtype == torch.float64 else torch.float32
    grad = gradient.to(wide) * multiplier
    if clip_value is not None:
        grad = grad.clamp(-clip_value, clip_value)
    if maximize:
        grad = -grad

    weight = master.to(wide)
    grad = grad + weight_decay * weight
    direction = grad
    if momentum_buffer is not None:
        buffer = grad if step == 1 else momentum * momentum_buffer.to(wide) + (1 - dampening) * grad
        momentum_buffer.copy_(buffer)
        direction = grad + momentum * buffer if nesterov else buffer

    weight = weight - lr * direction
    master.copy_(weight)
    if param is not None:
        param.copy_(weight)
