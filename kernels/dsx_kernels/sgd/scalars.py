"""What of `sgd`'s arguments is the same for all elements, as its kernels take it."""

from __future__ import annotations

import math


def scalars(
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    step: int,
    maximize: bool,
    multiplier: float,
    clip_value: float | None,
) -> tuple[float, ...]:
    """Those of update.h, in order."""
    first = step == 1
    return (
        -multiplier if maximize else multiplier,
        math.inf if clip_value is None else clip_value,
        weight_decay,
        0.0 if first else momentum,
        1.0 if first else 1 - dampening,
        momentum,
        lr,
    )
