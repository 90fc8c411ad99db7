"""The functions that transformers finds under the name "dsx": attention, and the mask that goes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dsx.contracts import Attend, plain_attention
from dsx.errors import DsxError

_REFUSED = {
    "output_attentions": "attention weights",
    "softcap": "a soft cap of the scores",
    "s_aux": "a learned sink",
    "head_mask": "a mask of heads",
}
"""Arguments that ask for what an `Attend` does not compute, and what that is."""


def register(name: str) -> None:
    """Put both functions into transformers' registries; doing so again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function, by the `attend` of the module.

    query, key, value  [batch, heads, tokens, head_dim], key heads maybe fewer
    attention_mask     from `mask` or the model's user: [batch, 1, 1, keys] says which keys there are, and the module
                       whether it is causal; one with a row for each query says everything
    position_bias      added to the scores
    returns            [batch, tokens, heads, head_dim], and no weights

    Raises `DsxError` for arguments that ask for something else.
    """
    for name, what in _REFUSED.items():
        if more.get(name) is not None and more[name] is not False:
            raise DsxError(
                f"a model of transformers asks its attention for {what}, which the part in [attention] cannot give",
                where=f"the argument {name} of {type(module).__name__}",
                remedy="leave these modules out of the modules of its plugin",
            )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if attention_mask is not None and attention_mask.shape[-2] != 1:
        causal = False
    if position_bias is not None:
        attention_mask = _biased(attention_mask, position_bias)
    attend: Attend = getattr(module, "attend", plain_attention)
    out = attend(query, key, value, attention_mask, causal=causal, dropout=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _biased(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else bias + mask


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **more: Any,
) -> Tensor | None:
    """transformers' mask function: boolean, True = may attend.

    Only keys, [batch, 1, 1, keys] or None for all, where the mask is causal or full by transformers' own functions and
    the last query sees the last key; else every pair, [batch, 1, queries, keys]. A full one beside padding has a row
    for each query, of stride 0, since one row would be causal in a causal module.
    """
    from transformers import masking_utils

    whole = local_size is None and isinstance(q_offset, int) and kv_offset == 0 and q_offset + q_length == kv_length
    mask_function = mask_function or masking_utils.causal_mask_function
    causal = mask_function is masking_utils.causal_mask_function
    if causal and whole:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        return None if padding is None else padding[:, None, None, :kv_length].to(torch.bool)
    if mask_function is masking_utils.bidirectional_mask_function and local_size is None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        if padding is None and more.get("allow_is_bidirectional_skip"):
            return None
        keys = padding if padding is not None else torch.ones(1, kv_length, dtype=torch.bool, device=more.get("device"))
        return keys[:, None, None, kv_offset : kv_offset + kv_length].expand(-1, -1, q_length, -1)
    skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    result: Tensor | None = masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **{**more, **skip},
    )
    return result
