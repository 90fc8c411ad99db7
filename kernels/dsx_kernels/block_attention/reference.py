"""The definition of `block_attention`, by the explicit mask of tokens; memory grows with query_len * key_len."""

from __future__ import annotations

import torch
from torch import Tensor

from dsx_kernels.block_attention import dropout
from dsx_kernels.block_attention.engine import Call, Engine


def forward(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    q_, k_, v_ = _wide(q), _repeated(k, q), _repeated(v, q)
    scores = _scores(q_, k_, call)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[..., None]) * _kept(scores, call)
    return _like(weights @ v_, q), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


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
    q_, k_, v_, grad_ = _wide(q), _repeated(k, q), _repeated(v, q), _wide(grad)
    scores = _scores(q_, k_, call)
    weights = torch.exp(scores - _wide(lse).nan_to_num(neginf=0.0)[..., None])
    kept = _kept(scores, call)
    delta = (grad_ * _wide(out)).sum(-1)
    delta = delta if grad_lse is None else delta - _wide(grad_lse)
    grad_scores = weights * ((grad_ @ v_.mT) * kept - delta[..., None])
    shared = (k.shape[0], k.shape[1], q.shape[1] // max(1, k.shape[1]), *k.shape[2:])
    return (
        _like(grad_scores @ k_ * call.scale, q),
        _like((grad_scores.mT @ q_ * call.scale).reshape(shared).sum(2), k),
        _like(((weights * kept).mT @ grad_).reshape(shared).sum(2), v),
        grad_scores.to(call.bias.dtype) if want_bias and call.bias is not None else None,
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def _like(tensor: Tensor, other: Tensor) -> Tensor:
    """A tensor with the dtype and the order of dimensions in memory of another."""
    return torch.empty_like(other).copy_(tensor)


def _repeated(tensor: Tensor, q: Tensor) -> Tensor:
    """Keys or values of each query head."""
    return _wide(tensor).repeat_interleave(q.shape[1] // max(1, tensor.shape[1]), dim=1)


def _scores(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """[batch, heads, query_len, key_len], -inf where a pair may not attend."""
    scores = q @ k.mT * call.scale
    if call.bias is not None:
        scores = scores + call.bias.to(scores.dtype)
    allowed = call.layout.mask()
    if call.key_padding is not None:
        allowed = allowed & call.key_padding[:, None, None, :]
    return scores.masked_fill(~allowed, float("-inf"))


def _kept(scores: Tensor, call: Call) -> Tensor | float:
    """The factor of dropout."""
    if not call.dropout:
        return 1.0
    batch, heads, queries, keys = scores.shape
    kept = dropout.keep(batch * heads, queries, keys, call.dropout, call.seed, scores.device)
    return kept.reshape(scores.shape).to(scores.dtype) / (1 - call.dropout)


ENGINE = Engine(forward, backward)
