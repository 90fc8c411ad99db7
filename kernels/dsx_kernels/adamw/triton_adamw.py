"""`adamw` by Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dsx_kernels.adamw.scalars import scalars
from dsx_kernels.triton_blocks import clamped, launch, number, quotient, read, root, wide, write


def adamw(
    gradient: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    max_exp_avg_sq: Tensor | None,
    param: Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    maximize: bool,
    multiplier: float,
    clip_value: float | None,
) -> None:
    values = scalars(lr, betas, eps, weight_decay, step, maximize, multiplier, clip_value)
    tensors = (gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, param)
    launch(_adamw, master, *tensors, master.numel(), *map(float, values), WIDE=wide(master))


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _adamw(
    gradient: tl.tensor,
    master: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    max_exp_avg_sq: tl.tensor,
    param: tl.tensor,
    count: tl.tensor,
    multiplier: tl.float64,
    limit: tl.float64,
    take1: tl.float64,
    keep2: tl.float64,
    take2: tl.float64,
    decay: tl.float64,
    rate: tl.float64,
    scale: tl.float64,
    eps: tl.float64,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)  # [BLOCK]
    # A whole block needs no mask: then accesses are as wide as can be, whatever `count` is a multiple of.
    if start + BLOCK <= count:
        _block(
            gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, param, index, None,
            multiplier, limit, take1, keep2, take2, decay, rate, scale, eps, WIDE,
        )  # fmt: skip
    else:
        _block(
            gradient, master, exp_avg, exp_avg_sq, max_exp_avg_sq, param, index, index < count,
            multiplier, limit, take1, keep2, take2, decay, rate, scale, eps, WIDE,
        )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _block(
    gradient: tl.tensor,
    master: tl.tensor,
    exp_avg: tl.tensor,
    exp_avg_sq: tl.tensor,
    max_exp_avg_sq: tl.tensor,
    param: tl.tensor,
    index: tl.tensor,
    mask: tl.tensor,
    multiplier: tl.tensor,
    limit: tl.tensor,
    take1: tl.tensor,
    keep2: tl.tensor,
    take2: tl.tensor,
    decay: tl.tensor,
    rate: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    WIDE: tl.constexpr,
) -> None:
    grad = clamped(read(gradient, index, mask, WIDE), multiplier, limit, WIDE)
    mean = read(exp_avg, index, mask, WIDE)
    mean += number(take1, WIDE) * (grad - mean)
    write(exp_avg, index, mask, mean)

    square = number(keep2, WIDE) * read(exp_avg_sq, index, mask, WIDE) + number(take2, WIDE) * grad * grad
    write(exp_avg_sq, index, mask, square)
    if max_exp_avg_sq is not None:
        most = read(max_exp_avg_sq, index, mask, WIDE)
        square = tl.where((most >= square) | (most != most), most, square)
        write(max_exp_avg_sq, index, mask, square)

    divisor = root(square) * number(scale, WIDE) + number(eps, WIDE)
    weight = read(master, index, mask, WIDE) * number(decay, WIDE) - number(rate, WIDE) * quotient(mean, divisor)
    write(master, index, mask, weight)
    if param is not None:
        write(param, index, mask, weight)
