"""What common operations make of tensors without values, told from shapes and dtypes alone.

torch's own answers are right too, but written for its compiler: the first one imports that, a thousand modules, and
each takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsx.deferred.on_meta import META, each

_ATEN = torch.ops.aten
Rule = Callable[..., Any]
"""Takes what the operation takes; NotImplemented where it does not know."""


def result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `func` returns for tensors on the meta device; NotImplemented where only torch knows.

    An operation that changes its arguments and returns nothing needs no kernel: torch's fused SGD has none for meta.
    """
    tensors = each(Tensor, (args, kwargs))
    if not tensors or not all(_is_plain(tensor) for tensor in tensors):
        return NotImplemented
    if func._schema.is_mutable and not func._schema.returns:
        return None
    return RULES[func](*args, **kwargs) if func in RULES else NotImplemented


def _is_plain(tensor: Tensor) -> bool:
    """Whether strides are no question, and results of arithmetic have the dtype of what went in."""
    return tensor.is_meta and tensor.is_contiguous() and tensor.is_floating_point()


def _new(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _unary(first: Tensor) -> Any:
    return _new(first.shape, first.dtype)


def _binary(first: Any, second: Any, *, alpha: float = 1) -> Any:
    """Of equal shapes, or with a number or a 0-dim tensor."""
    shapes = {operand.shape for operand in (first, second) if isinstance(operand, Tensor)}
    wide = {shape for shape in shapes if shape} or shapes
    if len(wide) > 1 or any(isinstance(number, complex) for number in (first, second, alpha)):
        return NotImplemented
    return _new(wide.pop(), torch.result_type(first, second))


def _into(first: Tensor, *others: Any, **choices: Any) -> Any:
    """Of an operation on each element that writes its first argument."""
    fit = all(other.shape in ((), first.shape) for other in each(Tensor, (others, choices)))
    return first if fit else NotImplemented


def _total(first: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _new((), dtype or first.dtype)


def _norm(
    first: Tensor,
    order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    return NotImplemented if dim or keepdim else _total(first, dtype=dtype)


def _like(first: Tensor, *, dtype: torch.dtype | None = None, **where: Any) -> Any:
    usual = where.get("memory_format") in (None, torch.preserve_format) and where.get("layout") in (None, torch.strided)
    return _new(first.shape, dtype or first.dtype) if usual else NotImplemented


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    kinds = {(tensor.shape, tensor.dtype) for tensor in tensors}
    if dim != 0 or len(kinds) > 1:
        return NotImplemented
    ((shape, dtype),) = kinds
    return _new((len(tensors), *shape), dtype)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    kinds = {(tensor.dim(), tensor.dtype) for tensor in tensors}
    if len(kinds) > 1 or tensors[0].dim() != 1:
        return NotImplemented
    return _new((sum(tensor.numel() for tensor in tensors),), tensors[0].dtype)


RULES: Mapping[Any, Rule] = {
    _ATEN.sqrt.default: _unary,
    _ATEN.neg.default: _unary,
    _ATEN.add.Tensor: _binary,
    _ATEN.sub.Tensor: _binary,
    _ATEN.mul.Tensor: _binary,
    _ATEN.div.Tensor: _binary,
    _ATEN.pow.Tensor_Scalar: _binary,
    _ATEN.add_.Tensor: _into,
    _ATEN.mul_.Tensor: _into,
    _ATEN.div_.Tensor: _into,
    _ATEN.clamp_.default: _into,
    _ATEN.sum.default: _total,
    _ATEN.linalg_vector_norm.default: _norm,
    _ATEN.ones_like.default: _like,
    _ATEN.zeros_like.default: _like,
    _ATEN.stack.default: _stack,
    _ATEN.cat.default: _cat,
}
