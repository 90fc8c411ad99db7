"""The operation of a site: attention by a pattern's name, for any lengths.

`torch.compile` sees one operation whose layout is looked up when it runs: graphs hold no lengths and no lists of
blocks, so other lengths need no other graph, and layers of one pattern share theirs.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import dsx_kernels.block_attention  # noqa: F401 -- registers torch.ops.dsx.block_attention
from dsx.contracts import Attend
from dsx.errors import DsxError
from dsx_sparse.cache import Layouts
from dsx_sparse.masks import padding_and_bias
from dsx_sparse.pattern import Pattern
from dsx_sparse.region import Shape

LAYOUTS = Layouts()

_PATTERNS: dict[str, Pattern] = {}
"""By name and options, which say all that a pattern is: the same in every process."""


def attend_by(name: str, pattern: Pattern) -> Attend:
    """The `Attend` of a pattern."""
    key = f"{name} {pattern!r}"
    _PATTERNS[key] = pattern

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        causal: bool = False,
        dropout: float = 0.0,
        scale: float | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        if torch.compiler.is_compiling():
            q, k, v = _in_order(q), _in_order(k), _in_order(v)
        seed = torch.randint(2**31, (), dtype=torch.int64) if dropout else None
        out: Tensor = _attend(q, k, v, mask, segments, seed, key, causal, scale, dropout)[0]
        return out

    return attend


@torch.library.custom_op("dsx_sparse::attend", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    layout = _layout(pattern, q, k, causal, segments)
    padding, bias = padding_and_bias(mask, q, k)
    number = 0 if seed is None else int(seed)
    out, lse = torch.ops.dsx.block_attention(
        q, k, v, layout.tensors(), _sizes(layout), padding, bias, scale, dropout, number
    )
    return _in_order(out), lse


@torch.library.custom_op("dsx_sparse::attend_backward", mutates_args=())
def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    segments: Tensor | None,
    seed: Tensor | None,
    pattern: str,
    causal: bool,
    scale: float,
    dropout: float,
    want_mask: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = _layout(pattern, q, k, causal, segments)
    padding, bias = padding_and_bias(mask, q, k)
    number = 0 if seed is None else int(seed)
    lists, sizes = layout.tensors(), _sizes(layout)
    dq, dk, dv, dbias = torch.ops.dsx.block_attention_backward(
        grad, None, q, k, v, out, lse, lists, sizes, padding, bias, scale, dropout, number, want_mask
    )
    dmask = q.new_empty(0) if mask is None or not want_mask else dbias.sum_to_size(mask.shape).contiguous()
    return _in_order(dq), _in_order(dk), _in_order(dv), dmask


@_attend.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return _fresh(q), q.new_empty(q.shape[:-1], dtype=wide)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None, *rest: Any) -> Any:
    masked = mask.new_empty(mask.shape) if mask is not None and rest[-1] else q.new_empty(0)
    return _fresh(q), _fresh(k), _fresh(v), masked


def _fresh(like: Tensor) -> Tensor:
    """Memory in the order [batch, tokens, heads, dim], in which models have it before and after."""
    return like.new_empty(like.shape[0], like.shape[2], like.shape[1], like.shape[3]).transpose(1, 2)


def _in_order(tensor: Tensor) -> Tensor:
    """The tensor as `_fresh` promises it; itself, if it is so.

    torch.compile takes the strides of what is kept for backward from the first length, where it laid that out otherwise
    than the model does; of a dense tensor in this order it has no reason to.
    """
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.pattern, ctx.causal, ctx.scale, ctx.dropout = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    out, lse, q, k, v, mask, segments, seed = ctx.saved_tensors
    if grad is None:
        return (None,) * 10
    want_mask = ctx.needs_input_grad[3]
    dq, dk, dv, dmask = _backward(
        grad, q, k, v, out, lse, mask, segments, seed, ctx.pattern, ctx.causal, ctx.scale, ctx.dropout, want_mask
    )
    return dq, dk, dv, dmask if want_mask else None, None, None, None, None, None, None


_attend.register_autograd(_differentiate, setup_context=_remember)


def _sizes(layout: Any) -> list[int]:
    return [layout.block, layout.query_len, layout.key_len]


def _layout(key: str, q: Tensor, k: Tensor, causal: bool, segments: Tensor | None) -> Any:
    pattern, where = _PATTERNS[key], f"[attention.{key.partition(' ')[0]}]"
    queries, keys = q.shape[2], k.shape[2]
    if pattern.one_sequence and queries != keys and not (causal and queries < keys):
        raise DsxError(
            f"a pattern of one sequence is asked for attention of {queries} queries and {keys} keys",
            where=where,
            expected="self-attention; or causal attention to a cache of earlier keys",
            remedy="leave cross-attention out of its modules, or claim it by `dense`",
        )
    if pattern.segmented and segments is None:
        raise DsxError(
            "a pattern of documents is asked for attention without segment ids",
            where=where,
            remedy="call attention with segments=..., int [batch, key tokens]: docs/how-to/attention.md",
        )
    if segments is not None and (segments.is_floating_point() or segments.shape != (k.shape[0], keys)):
        raise DsxError(
            f"segment ids are {str(segments.dtype).removeprefix('torch.')} {list(segments.shape)}",
            where=where,
            expected=f"integers [batch, key tokens] = {[k.shape[0], keys]}",
            remedy="give every key token the number of its segment",
        )
    return LAYOUTS.get(pattern, key, Shape(q.shape[1], queries, keys, pattern.block, causal), segments, q.device)
