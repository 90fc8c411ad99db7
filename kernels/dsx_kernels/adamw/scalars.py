"""What of `adamw`'s arguments is the same for all elements, as its kernels take it."""

from __future__ import annotations

import math


def scalars(
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
    multiplier: float,
    clip_value: float | None,
) -> tuple[float, ...]:
    """Those of update.h, in order."""
    return (
        -multiplier if maximize else multiplier,
        math.inf if clip_value is None else clip_value,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        1 - lr * weight_decay,
        lr / (1 - betas[0] ** step),
        1 / math.sqrt(1 - betas[1] ** step),
        eps,
    )
