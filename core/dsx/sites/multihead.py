"""Sites that are torch's `nn.MultiheadAttention`, those in its transformer layers among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from dsx.contracts import Attend, Site
from dsx.contracts.attention import joined
from dsx.errors import DsxError


def find(model: nn.Module) -> Iterator[Site]:
    forwards: dict[Attend, Callable[..., Any]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
            yield Site(name, module, "is an nn.MultiheadAttention", partial(_place, forwards, module, name))


def _place(
    forwards: dict[Attend, Callable[..., Any]], module: nn.MultiheadAttention, name: str, attend: Attend
) -> Callable[[], None]:
    if module.bias_k is not None or module.add_zero_attn:
        raise DsxError(
            f"the attention of '{name}' cannot be replaced",
            found="it adds a key of its own: add_bias_kv or add_zero_attn",
            remedy="leave it out of the modules of its plugin in [attention]",
        )
    setattr(module, "forward", MethodType(forwards.setdefault(attend, _forward(attend)), module))  # noqa: B010
    # torch's transformer layers do not call this module in evaluation, unless it has a hook
    hook = module.register_forward_pre_hook(_nothing)

    def undo() -> None:
        hook.remove()
        del module.forward

    return undo


def _nothing(module: nn.Module, args: Any) -> None:
    return None


def _forward(attend: Attend) -> Callable[..., Any]:
    """`nn.MultiheadAttention.forward` around an `Attend`."""

    def forward(
        self: nn.MultiheadAttention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        _check(query, need_weights)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
        q, k, v = (_heads(x, self.num_heads) for x in _projected(self, query, key, value))
        mask = None if is_causal else _allowed(attn_mask, self.num_heads)
        if key_padding_mask is not None:
            padding = key_padding_mask if batched else key_padding_mask.unsqueeze(0)
            mask = _both(mask, padding[:, None, None, :])
        heads = attend(q, k, v, mask, causal=is_causal, dropout=self.dropout if self.training else 0.0)
        out = functional.linear(heads.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)
        if not batched:
            return out.squeeze(0), None
        return out if self.batch_first else out.transpose(0, 1), None

    return forward


def _check(query: Tensor, need_weights: bool) -> None:
    if need_weights:
        raise DsxError(
            "nn.MultiheadAttention is asked for attention weights, which the part in [attention] does not compute",
            expected="need_weights=False",
            remedy="pass need_weights=False, or leave this module out of the plugin's modules",
        )
    if query.is_nested:
        raise DsxError(
            "nn.MultiheadAttention is given nested tensors",
            expected="padded ones and a key_padding_mask",
            remedy="make the nn.TransformerEncoder with enable_nested_tensor=False",
        )


def _projected(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    biases = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if module._qkv_same_embed_dim:
        if query is key is value:
            return functional.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, dim=-1)
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    each = zip((query, key, value), weights, biases, strict=True)
    return tuple(functional.linear(tensor, weight, bias) for tensor, weight, bias in each)


def _heads(tensor: Tensor, heads: int) -> Tensor:
    return tensor.view(*tensor.shape[:-1], heads, -1).transpose(1, 2)


def _allowed(mask: Tensor | None, heads: int) -> Tensor | None:
    """This module's boolean masks say True where a pair may not attend; one with three dimensions is
    [batch * heads, queries, keys]."""
    if mask is None:
        return None
    mask = mask.view(-1, heads, *mask.shape[1:]) if mask.dim() == 3 else mask
    return ~mask if mask.dtype == torch.bool else mask


def _both(mask: Tensor | None, padding: Tensor) -> Tensor:
    """With the mask of keys, whose booleans say True for padding; as a mask of keys alone, if there is no other."""
    if padding.dtype == torch.bool:
        return joined(mask, ~padding)
    if mask is not None and mask.dtype == torch.bool:
        return joined(padding.expand(-1, -1, mask.shape[-2], -1), mask)
    return padding if mask is None else mask + padding
