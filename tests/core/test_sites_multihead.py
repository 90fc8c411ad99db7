"""Sites that are `nn.MultiheadAttention`: its masks, widths and orders keep their meaning; and what a plain `Attend`
makes of masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsx.contracts import plain_attention
from dsx.errors import DsxError
from dsx.sites import find_sites

X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


def both(**call: Any) -> tuple[Any, Any]:
    """What an nn.MultiheadAttention gives, and what it gives around `plain_attention`."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, batch_first=True)
    expected = module(X, X, X, need_weights=False, **call)[0]
    (site,) = find_sites(module)
    site.place(plain_attention)
    return module(X, X, X, need_weights=False, **call)[0], expected


PADDING = torch.tensor([[False] * 5, [False, False, False, True, True]])


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"key_padding_mask": PADDING},
        {"key_padding_mask": torch.zeros(2, 5).masked_fill(PADDING, -math.inf)},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
        {"attn_mask": torch.randn(4, 5, 5, generator=torch.Generator().manual_seed(0)) > 5},
        {"attn_mask": torch.linspace(0, 1, 25).view(5, 5), "key_padding_mask": torch.zeros(2, 5)},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "key_padding_mask": PADDING},
        {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "key_padding_mask": PADDING, "is_causal": True},
    ],
    ids=str,
)
def test_masks_of_a_multihead_attention_keep_their_meaning(call: dict[str, Any]) -> None:
    found, expected = both(**call)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_multihead_attention_of_other_widths_and_orders(batch_first: bool) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, kdim=6, vdim=4, batch_first=batch_first, bias=False)
    q, k, v = torch.randn(3, 5, 8), torch.randn(3, 7, 6), torch.randn(3, 7, 4)
    q, k, v = (t if batch_first else t.transpose(0, 1) for t in (q, k, v))
    expected = module(q, k, v, need_weights=False)[0]
    single = module(q[:, 0], k[:, 0], v[:, 0], need_weights=False)[0] if not batch_first else None
    (site,) = find_sites(module)
    undo = site.place(plain_attention)
    torch.testing.assert_close(module(q, k, v, need_weights=False)[0], expected)
    if single is not None:
        torch.testing.assert_close(module(q[:, 0], k[:, 0], v[:, 0], need_weights=False)[0], single)
    undo()
    assert "forward" not in module.__dict__ and not module._forward_pre_hooks


def test_weights_of_a_multihead_attention_are_refused() -> None:
    module = nn.MultiheadAttention(8, 2)
    (site,) = find_sites(module)
    site.place(plain_attention)
    with pytest.raises(DsxError, match="is asked for attention weights"):
        module(X, X, X)


def test_transformer_layers_of_torch_do_not_go_round_their_attention() -> None:
    """In evaluation they compute it by a function of their own."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad():
        expected = model(X, src_key_padding_mask=PADDING)
    calls = []

    def attend(*args: Any, **choices: Any) -> Tensor:
        calls.append(args[0].shape)
        return plain_attention(*args, **choices)

    for site in find_sites(model):
        site.place(attend)
    with torch.no_grad():
        found = model(X, src_key_padding_mask=PADDING)
    assert len(calls) == 2
    torch.testing.assert_close(found[~PADDING], expected[~PADDING])


def test_plain_attention_sees_a_cache_segments_and_masks() -> None:
    q, k, v = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    segments = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    padding = torch.tensor([[True] * 5, [True, True, False, True, True]])[:, None, None]
    allowed = torch.ones(3, 5, dtype=torch.bool).tril(2)
    allowed = allowed & padding & (segments[:, None, 2:, None] == segments[:, None, None])
    k2, v2 = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    expected = torch.softmax((q @ k2.mT / 8**0.5).masked_fill(~allowed, -math.inf), -1) @ v2
    found = plain_attention(q, k, v, padding, causal=True, segments=segments)
    torch.testing.assert_close(found, expected)
    added = torch.zeros(2, 1, 1, 5).masked_fill(~padding, -math.inf)
    torch.testing.assert_close(plain_attention(q, k, v, added, causal=True, segments=segments), expected)
    with pytest.raises(DsxError, match="an attention mask has dtype int64"):
        plain_attention(q, k, v, padding.long())
    with pytest.raises(DsxError, match=r"an attention mask has shape \[2, 5\]"):
        plain_attention(q, k, v, padding[:, 0, 0])
