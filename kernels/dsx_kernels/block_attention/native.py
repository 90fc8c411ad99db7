"""`block_attention` by native.cpp."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from dsx_kernels.block_attention import dropout
from dsx_kernels.block_attention.engine import Call, Engine, laid_out_as, room_for
from dsx_kernels.library import CODES, Function


class View(ctypes.Structure):
    """`View` of problem.h."""

    _fields_ = (
        ("data", c_void_p),
        ("batch", c_int64),
        ("head", c_int64),
        ("token", c_int64),
        ("type", c_int64),
    )


_VIEWS = ("q", "k", "v", "out", "grad", "grad_q", "grad_k", "grad_v")
_FLOATS = ("lse", "delta", "grad_lse")
_SIZES = ("batch", "heads", "key_heads", "queries", "keys", "dim", "block", "query_blocks", "key_blocks")
_LISTS = ("offsets", "columns", "heads", "windows", "query_segments", "key_segments", "masks", "kinds", "bits")
_TRANSPOSED = ("column_offsets", "rows", "entries")
_STRIDES = ("groups_batch", "query_segments_batch", "key_segments_batch")


class Problem(ctypes.Structure):
    """`Problem` of problem.h."""

    _fields_ = (
        *((name, View) for name in _VIEWS),
        *((name, c_void_p) for name in (*_FLOATS, "padding", "bias", "grad_bias")),
        *((f"bias_{name}", c_int64) for name in ("batch", "head", "query")),
        *((name, c_int64) for name in _SIZES),
        *((f"list_{name}", c_void_p) for name in (*_LISTS, *_TRANSPOSED)),
        *((name, c_int64) for name in _STRIDES),
        *((name, c_double) for name in ("scale", "kept")),
        *((name, c_int64) for name in ("threshold", "seed")),
    )


_forward = Function("dsx_block_attention_forward", None, POINTER(Problem), c_int32)
_backward = Function("dsx_block_attention_backward", None, POINTER(Problem), c_int32)


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    out = room_for(q)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    if out.numel():
        problem, _kept = _problem(q, k, call, {"q": q, "k": k, "v": v, "out": out}, {"lse": lse})
        _forward(problem, torch.get_num_threads())
    return laid_out_as(q, out), lse


def backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: Call,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    grads = [room_for(tensor) for tensor in (q, k, v)]
    grad_bias = q.new_zeros(*q.shape[:-1], k.shape[2], dtype=torch.float32) if want_bias else None
    if q.numel() and k.numel():
        views = {"q": q, "k": k, "v": v, "out": out, "grad": grad}
        views |= {f"grad_{name}": tensor for name, tensor in zip("qkv", grads, strict=True)}
        floats = {"lse": lse, "delta": torch.empty_like(lse), "grad_lse": grad_lse, "grad_bias": grad_bias}
        problem, _kept = _problem(q, k, call, views, floats)
        _backward(problem, torch.get_num_threads())
    else:
        for tensor in grads:
            tensor.zero_()
    if grad_bias is not None and call.bias is not None:
        grad_bias = grad_bias.to(call.bias.dtype)
    return laid_out_as(q, grads[0]), laid_out_as(k, grads[1]), laid_out_as(v, grads[2]), grad_bias


def _problem(
    q: Tensor, k: Tensor, call: Call, views: dict[str, Tensor], floats: dict[str, Tensor | None]
) -> tuple[Problem, list[Tensor]]:
    """What the library is told, and the tensors that have to live as long."""
    problem, layout, kept = Problem(), call.layout, list[Tensor]()

    def pointer(name: str, tensor: Tensor | None) -> None:
        if tensor is not None and tensor.numel():
            kept.append(tensor.contiguous())
            setattr(problem, name, kept[-1].data_ptr())

    for name, tensor in views.items():
        kept.append(tensor if tensor.stride(-1) == 1 else tensor.contiguous())
        setattr(problem, name, View(kept[-1].data_ptr(), *kept[-1].stride()[:3], CODES[tensor.dtype]))
    for name, wide in floats.items():
        pointer(name, wide)
    pointer("padding", call.key_padding)
    for name in (*_LISTS, *_TRANSPOSED):
        pointer(f"list_{name}", getattr(layout, name))
    if call.bias is not None:
        kept.append(_bias(call.bias))
        problem.bias = kept[-1].data_ptr()
        problem.bias_batch, problem.bias_head, problem.bias_query = kept[-1].stride()[:3]
    (batch, heads, queries, dim), (_, key_heads, keys, _) = q.shape, k.shape
    blocks = (layout.block, layout.query_blocks, layout.key_blocks)
    for name, size in zip(_SIZES, (batch, heads, key_heads, queries, keys, dim, *blocks), strict=True):
        setattr(problem, name, size)
    problem.groups_batch = q.shape[1] if layout.heads.dim() == 2 else 0
    problem.query_segments_batch = layout.query_len if len(layout.query_segments) > 1 else 0
    problem.key_segments_batch = layout.key_len if len(layout.key_segments) > 1 else 0
    problem.scale, problem.kept = call.scale, 1 / (1 - call.dropout)
    problem.threshold, problem.seed = dropout.threshold(call.dropout), call.seed & dropout.MASK
    return problem, kept


def _bias(bias: Tensor) -> Tensor:
    """In fp32 with its last dimension contiguous, still without memory where it is broadcast."""
    own = bias[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in bias.stride()[:3])]
    return own.to(torch.float32).contiguous().expand(bias.shape)


ENGINE = Engine(forward, backward)
