"""What Triton kernels share: reading, writing, exact arithmetic, and the start of a kernel on flat slices.

The arithmetic is that of native.cpp: no fused multiply-add, quotients and roots rounded to nearest. So an element's
bits depend neither on its place in a block nor on the kind of device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of each tensor that one program works on, 8 a thread: a 16-byte access for 16-bit tensors, two for fp32."""


OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def launch(kernel: Any, tensor: Tensor, *arguments: Any, block: int = BLOCK, **constants: Any) -> None:
    """Start a kernel for every block of a tensor's elements, on the current stream of its device."""
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        grid = (triton.cdiv(tensor.numel(), block),)
        kernel[grid](*arguments, BLOCK=block, **constants, **OPTIONS)


def wide(tensor: Tensor) -> Any:
    """The type in which an operation computes whose result is this tensor."""
    return tl.float64 if tensor.dtype == torch.float64 else tl.float32


@triton.jit  # type: ignore[untyped-decorator]
def read(data: tl.tensor, index: tl.tensor, mask: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Elements, widened before anything is done with them."""
    return tl.load(data + index, mask=mask).to(WIDE)


@triton.jit  # type: ignore[untyped-decorator]
def write(data: tl.tensor, index: tl.tensor, mask: tl.tensor, values: tl.tensor) -> None:
    """Elements, rounded to nearest even; to 16 bits by way of fp32, as torch does."""
    if data.dtype.element_ty.primitive_bitwidth == 16:
        tl.store(data + index, values.to(tl.float32).to(data.dtype.element_ty), mask=mask)
    else:
        tl.store(data + index, values.to(data.dtype.element_ty), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def number(value: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """A number that was given in fp64."""
    return tl.full((), value, WIDE)


@triton.jit  # type: ignore[untyped-decorator]
def quotient(one: tl.tensor, other: tl.tensor) -> tl.tensor:
    """one / other, rounded to nearest; plain fp32 division is not."""
    return tl.div_rn(one, other) if one.dtype == tl.float32 else one / other


@triton.jit  # type: ignore[untyped-decorator]
def root(value: tl.tensor) -> tl.tensor:
    """The square root, rounded to nearest; plain fp32 roots are not."""
    return tl.sqrt_rn(value) if value.dtype == tl.float32 else tl.sqrt(value)


@triton.jit  # type: ignore[untyped-decorator]
def clamped(gradient: tl.tensor, multiplier: tl.tensor, limit: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """A gradient as an update sees it: multiplied, clamped, NaN kept."""
    scaled = gradient * number(multiplier, WIDE)
    most = number(limit, WIDE)
    below = tl.where(scaled > most, most, scaled)
    return tl.where(below < -most, -most, below)
