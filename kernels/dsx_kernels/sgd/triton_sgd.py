"""`sgd` by Triton."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.triton_blocks import clamped, launch, number, read, wide, write


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
    numbers = (
        -multiplier if maximize else multiplier,
        math.inf if clip_value is None else clip_value,
        weight_decay,
        momentum,
        1 - dampening,
        lr,
    )
    tensors = (gradient, master, momentum_buffer, param)
    flags = {"FIRST": step == 1, "NESTEROV": nesterov, "WIDE": wide(master)}
    launch(_sgd, master, *tensors, master.numel(), *map(float, numbers), **flags)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _sgd(
    gradient: tl.tensor,
    master: tl.tensor,
    momentum_buffer: tl.tensor,
    param: tl.tensor,
    count: tl.tensor,
    multiplier: tl.float64,
    limit: tl.float64,
    weight_decay: tl.float64,
    momentum: tl.float64,
    share: tl.float64,
    lr: tl.float64,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)  # [BLOCK]
    # A whole block needs no mask: then accesses are as wide as can be, whatever `count` is a multiple of.
    if start + BLOCK <= count:
        _block(
            gradient, master, momentum_buffer, param, index, None,
            multiplier, limit, weight_decay, momentum, share, lr, FIRST, NESTEROV, WIDE,
        )  # fmt: skip
    else:
        _block(
            gradient, master, momentum_buffer, param, index, index < count,
            multiplier, limit, weight_decay, momentum, share, lr, FIRST, NESTEROV, WIDE,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    gradient: tl.tensor,
    master: tl.tensor,
    momentum_buffer: tl.tensor,
    param: tl.tensor,
    index: tl.tensor,
    mask: tl.tensor,
    multiplier: tl.tensor,
    limit: tl.tensor,
    weight_decay: tl.tensor,
    momentum: tl.tensor,
    share: tl.tensor,
    lr: tl.tensor,
    FIRST: tl.constexpr,
    NESTEROV: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    weight = read(master, index, mask, WIDE)
    direction = clamped(read(gradient, index, mask, WIDE), multiplier, limit, WIDE)
    direction += number(weight_decay, WIDE) * weight
    if momentum_buffer is not None:
        buffer = direction
        if not FIRST:
            kept = number(momentum, WIDE) * read(momentum_buffer, index, mask, WIDE)
            buffer = kept + number(share, WIDE) * direction
        write(momentum_buffer, index, mask, buffer)
        direction = direction + number(momentum, WIDE) * buffer if NESTEROV else buffer
    weight -= number(lr, WIDE) * direction
    write(master, index, mask, weight)
    if param is not None:
        write(param, index, mask, weight)
