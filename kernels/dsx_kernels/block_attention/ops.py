"""`block_attention`: softmax attention over listed blocks of the score matrix."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from dsx_kernels import library, needs
from dsx_kernels.block_attention.engine import Call, Engine
from dsx_kernels.block_attention.layout import BlockLayout
from dsx_kernels.choice import Implementation, Operation

_WIDE_AND_HALF = (torch.float32, torch.bfloat16, torch.float16)

OPERATION = Operation(
    "block_attention",
    Implementation(
        "native",
        "dsx_kernels.block_attention.native:ENGINE",
        devices=("cpu",),
        dtypes=_WIDE_AND_HALF,
        missing=library.missing,
    ),
    Implementation(
        "triton",
        "dsx_kernels.block_attention.triton_engine:ENGINE",
        devices=("cuda",),
        dtypes=_WIDE_AND_HALF,
        missing=needs.triton,
    ),
    Implementation("reference", "dsx_kernels.block_attention.reference:ENGINE"),
)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    *,
    scale: float | None = None,
    key_padding: Tensor | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale q kᵀ + bias) v over the pairs that a layout lets attend, with gradients of q, k, v and bias.

    q            [batch, heads, query_len, dim]
    k, v         [batch, key heads, key_len, dim], `heads` a multiple of `key heads`: neighbours share (Ainslie et al.
                 2023, arXiv 2305.13245)
    layout       its lengths and heads are those of q and k, on their device
    scale        of the scores, 1 / sqrt(dim) by default
    key_padding  bool [batch, key_len], True = may attend
    bias         added to the scaled scores; of any shape that broadcasts to [batch, heads, query_len, key_len]
    dropout      probability that a pair is left out; the rest is divided by 1 - dropout
    seed         of dropout: what is dropped depends on it, the head and the positions only
    returns      like q; with `return_lse` also the log-sum-exp of the scores, fp32 [batch, heads, query_len] (fp64 for
                 fp64), differentiable

    fp32, bf16, fp16 or fp64, one dtype for all three, any strides. A query without keys gives zeros, a log-sum-exp of
    -inf, and gradients of zero. Time and memory grow with the number of listed blocks (online softmax, recomputed for
    the backward pass: Dao 2023, arXiv 2307.08691). Sums have a fixed order: the same bits whatever the number of
    threads. Not differentiable twice. `ValueError` for tensors that do not fit, `KernelUnavailable` for other dtypes.
    """
    _check(q, k, v, layout, key_padding, dropout)
    if bias is not None:
        bias = _four_dims(bias, q, k)
    out, lse = _attend(
        q,
        k,
        v,
        layout.tensors(),
        [layout.block, layout.query_len, layout.key_len],
        key_padding,
        bias,
        1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        dropout,
        seed,
    )
    return (out, lse) if return_lse else out


@torch.library.custom_op("dsx::block_attention", mutates_args=())
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: list[Tensor],
    sizes: list[int],
    key_padding: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    call = _call(q, k, layout, sizes, key_padding, bias, scale, dropout, seed)
    return _engine(q).forward(q, k, v, call)


@torch.library.custom_op("dsx::block_attention_backward", mutates_args=())
def _backward(
    grad: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    layout: list[Tensor],
    sizes: list[int],
    key_padding: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    seed: int,
    want_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _call(q, k, layout, sizes, key_padding, bias, scale, dropout, seed)
    grads = _engine(q).backward(grad, grad_lse, q, k, v, out, lse, call, want_bias)
    none = q.new_empty(0, dtype=q.dtype if bias is None else bias.dtype)
    return grads[0], grads[1], grads[2], none if grads[3] is None else grads[3]


@_attend.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)


@_backward.register_fake
def _(grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    bias, want_bias = rest[5], rest[-1]
    shape = (*q.shape[:-1], k.shape[2]) if want_bias and bias is not None else (0,)
    dtype = q.dtype if bias is None else bias.dtype
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), q.new_empty(shape, dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, layout, ctx.sizes, key_padding, bias, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, key_padding, bias, *layout)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    q, k, v, out, lse, key_padding, bias, *layout = ctx.saved_tensors
    want_bias = bias is not None and ctx.needs_input_grad[6]
    grad = torch.zeros_like(out) if grad is None else grad
    *grads, grad_bias = _backward(
        grad, grad_lse, q, k, v, out, lse, layout, ctx.sizes, key_padding, bias, *ctx.numbers, want_bias
    )
    grad_bias = grad_bias.sum_to_size(bias.shape) if want_bias else None
    return (*grads, [None] * len(layout), None, None, grad_bias, None, None, None)


_attend.register_autograd(_differentiate, setup_context=_remember)


def _engine(q: Tensor) -> Engine:
    return cast(Engine, OPERATION.pick(q.device, q.dtype))


def _call(
    q: Tensor,
    k: Tensor,
    layout: list[Tensor],
    sizes: list[int],
    key_padding: Tensor | None,
    bias: Tensor | None,
    scale: float,
    dropout: float,
    seed: int,
) -> Call:
    wide = None if bias is None else bias.expand(*q.shape[:-1], k.shape[2])
    return Call(BlockLayout.of_tensors(sizes, layout), scale, key_padding, wide, dropout, seed)


def _check(q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, key_padding: Tensor | None, dropout: float) -> None:
    """`ValueError` unless all fit together."""
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        raise ValueError(
            "block_attention: q is [batch, heads, query_len, dim], k and v are [batch, key heads, key_len, dim]; "
            f"found {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
        )
    batch, heads, queries, dim = q.shape
    if (k.shape[0], k.shape[3]) != (batch, dim) or heads % max(1, k.shape[1]):
        raise ValueError(
            f"block_attention: q {list(q.shape)} and k {list(k.shape)} differ in batch or dim, "
            "or heads are no multiple of key heads"
        )
    for name, tensor in {"k": k, "v": v}.items():
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"block_attention: {name} is {tensor.dtype} on {tensor.device}, q {q.dtype} on {q.device}: convert it"
            )
    if (layout.query_len, layout.key_len) != (queries, k.shape[2]):
        raise ValueError(
            f"block_attention: the layout is for {layout.query_len} queries and {layout.key_len} keys, "
            f"q has {queries} and k {k.shape[2]}: make one for these lengths"
        )
    if layout.heads.shape not in ((heads,), (batch, heads)):
        raise ValueError(
            f"block_attention: the layout's heads are {list(layout.heads.shape)}, not [{heads}] or [{batch}, {heads}]"
        )
    if layout.offsets.device != q.device:
        raise ValueError(
            f"block_attention: the layout is on {layout.offsets.device}, q on {q.device}: use layout.to(q.device)"
        )
    if key_padding is not None and (key_padding.dtype != torch.bool or key_padding.shape != (batch, k.shape[2])):
        raise ValueError(
            f"block_attention: key_padding is {key_padding.dtype} {list(key_padding.shape)}, not torch.bool "
            f"{[batch, k.shape[2]]} with True where a key may be attended to"
        )
    if not 0 <= dropout < 1:
        raise ValueError(f"block_attention: dropout {dropout} is not within [0, 1)")


def _four_dims(bias: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The bias as [batch, heads, query_len, key_len], ones where it broadcasts; `ValueError` if it does not."""
    wanted = [*q.shape[:-1], k.shape[2]]
    fits = bias.dim() <= 4 and all(
        have in (1, want) for have, want in zip(bias.shape[::-1], wanted[::-1], strict=False)
    )
    if not fits or not bias.is_floating_point() or bias.device != q.device:
        raise ValueError(
            f"block_attention: bias is {bias.dtype} {list(bias.shape)} on {bias.device}, and does not broadcast to "
            f"numbers {wanted} on {q.device}; a mask of bools is no bias: give pairs by the layout"
        )
    return bias[(None,) * (4 - bias.dim())]
