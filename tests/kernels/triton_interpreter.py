"""Triton's interpreter, corrected for bfloat16: `install()`, before the first launch.

The interpreter holds bfloat16 as 16-bit integers. It cuts bits off where the hardware rounds, and adds and multiplies
the integers. Here conversion rounds to nearest even, products of matrices widen their operands, and other arithmetic is
refused: kernels widen what they load.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(bits: NDArray[Any]) -> NDArray[Any]:
    """uint16 bits of bfloat16 -> float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def narrow(values: NDArray[Any]) -> NDArray[Any]:
    """float32 -> uint16 bits of bfloat16, to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    high = bits >> np.uint32(16)
    rounded = (bits + np.uint32(0x7FFF) + (high & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), high | np.uint32(0x40), rounded).astype(np.uint16)


def install() -> None:
    """Replace the interpreter's conversions and arithmetic, for this process."""
    convert, binary, unary = InterpreterBuilder.cast_impl, InterpreterBuilder.binary_op, InterpreterBuilder.unary_op
    dot = InterpreterBuilder.create_dot

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        before, after = source.dtype.scalar, target.scalar
        if before == tl.bfloat16 and after != tl.bfloat16:
            return convert(self, TensorHandle(widen(source.data), tl.float32), target)
        if after == tl.bfloat16 and before != tl.bfloat16:
            return TensorHandle(narrow(source.data.astype(np.float32)), tl.bfloat16)
        return convert(self, source, target)

    def binary_op(self: Any, one: Any, other: Any, operation: Any) -> Any:
        _refuse(operation, one, other)
        return binary(self, one, other, operation)

    def unary_op(self: Any, one: Any, operation: Any) -> Any:
        _refuse(operation, one)
        return unary(self, one, operation)

    def create_dot(self: Any, one: Any, other: Any, *rest: Any) -> Any:
        return dot(self, _wide(one), _wide(other), *rest)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.unary_op = unary_op


def _wide(operand: Any) -> Any:
    return TensorHandle(widen(operand.data), tl.float32) if operand.dtype.scalar == tl.bfloat16 else operand


def _refuse(operation: Any, *operands: Any) -> None:
    if any(operand.dtype.scalar == tl.bfloat16 for operand in operands):
        raise TypeError(f"{operation.__name__} of bfloat16: a kernel widens what it loads before it computes")
