"""Attention as it will run on the device, where torch on the meta device would spell it out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class FusedAttention(TorchFunctionMode):
    """`scaled_dot_product_attention` on the meta device is one operation that keeps its output and one number for each
    query, as the fused kernels of CPUs and GPUs do, not [tokens, tokens] of probabilities."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attend(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    fits = query.is_meta and query.dim() == 4 and query.shape[-1] == value.shape[-1] and dropout_p == 0.0
    if not fits or (attn_mask is not None and attn_mask.requires_grad):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    output: Tensor = _FUSED(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output
