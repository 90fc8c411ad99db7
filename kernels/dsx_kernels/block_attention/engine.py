"""What an implementation of `block_attention` is: a forward and a backward pass, and what both are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dsx_kernels.block_attention.layout import BlockLayout


class Call(NamedTuple):
    """One call, as implementations see it.

    scale        of the scores
    key_padding  bool [batch, keys], True = may attend, or None
    bias         [batch, heads, query_len, key_len], strides of 0 where it is broadcast, or None
    dropout      probability that a pair is dropped; `dropout.keep` says which are
    seed         of dropout
    """

    layout: BlockLayout
    scale: float
    key_padding: Tensor | None
    bias: Tensor | None
    dropout: float
    seed: int


Forward = Callable[[Tensor, Tensor, Tensor, Call], tuple[Tensor, Tensor]]
"""(q, k, v, call) -> output like q, and log-sum-exp fp32 [batch, heads, query_len], -inf for rows without keys."""

Backward = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
"""(grad, grad_lse, q, k, v, out, lse, call, want_bias) -> gradients of q, k, v and, if wanted, bias.

grad       of the output
grad_lse   of the log-sum-exp, [batch, heads, query_len] or None
want_bias  the bias' gradient too: like `call.bias`, without broadcasting
"""


class Engine(NamedTuple):
    forward: Forward
    backward: Backward


def room_for(tensor: Tensor) -> Tensor:
    """A tensor to be written: in memory like another, but with its last dimension contiguous."""
    made = torch.empty_like(tensor)
    return made if made.stride(-1) == 1 else made.contiguous()


def laid_out_as(tensor: Tensor, made: Tensor) -> Tensor:
    """What was written, in memory like another."""
    like = torch.empty_like(tensor, device="meta")
    return made if made.stride() == like.stride() else torch.empty_like(tensor).copy_(made)
