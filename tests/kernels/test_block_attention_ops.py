"""`block_attention` as it is called: autograd, compilation, what is refused; and its layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dsx_kernels.block_attention import BITS, CAUSAL, FULL, SEGMENTS, WINDOW, BlockLayout, block_attention
from kernels.attention_cases import BF16, F64, Case, dense


def layout_of(blocks: Tensor, tokens: int, **more: Any) -> BlockLayout:
    return BlockLayout.from_blocks(blocks[None], block=16, query_len=tokens, key_len=tokens, heads=[0, 0], **more)


def band(tokens: int, **more: Any) -> BlockLayout:
    count = -(-tokens // 16)
    return layout_of((torch.arange(count)[:, None] - torch.arange(count)).abs() < 2, tokens, causal=True, **more)


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, 2, tokens, 16, dtype=dtype, requires_grad=True) for _ in range(3)]


def test_the_public_function_differentiates_as_dense_attention_does() -> None:
    case = Case(70, 90, heads=4, bias=(1, 4, 70, 90), padding=True, dropout=0.2, batch=2)
    made = case.tensors()
    leaves = [made[name].requires_grad_() for name in ("q", "k", "v", "bias")]
    out, lse = block_attention(
        *leaves[:3], case.layout(), bias=leaves[3], key_padding=made["padding"], dropout=0.2, seed=7, return_lse=True
    )
    total = (out * made["grad"]).sum() + (lse.nan_to_num(neginf=0.0) * made["grad_lse"]).sum()
    wanted = dense(case)
    for name, grad in zip(("q", "k", "v", "bias"), torch.autograd.grad(total, leaves), strict=True):
        torch.testing.assert_close(grad.double(), wanted[f"grad_{name}"], rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_finite_differences() -> None:
    layout = band(20, window=9)
    q, k, v = inputs(20, F64)
    bias = torch.randn(20, 20, dtype=F64, requires_grad=True)
    torch.autograd.gradcheck(
        lambda *leaves: block_attention(*leaves[:3], layout, bias=leaves[3], return_lse=True),
        (q, k, v, bias),
        fast_mode=True,
    )


def test_only_the_log_sum_exp_may_be_differentiated() -> None:
    q, k, v = inputs(33)
    _, lse = block_attention(q, k, v, band(33), return_lse=True)
    grads = torch.autograd.grad(lse.sum(), (q, k, v))
    assert grads[0].any() and grads[1].any() and not grads[2].any()


def test_memory_follows_the_order_of_dimensions_of_the_inputs() -> None:
    """A model that merges heads by transposing back need not copy."""
    q = torch.randn(1, 40, 2, 16).transpose(1, 2)
    out = block_attention(q, q, q, band(40))
    assert isinstance(out, Tensor) and out.transpose(1, 2).is_contiguous()


def test_torch_compile_keeps_the_graph_whole() -> None:
    layout = band(40)
    q, k, v = inputs(40)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = block_attention(q * 2, k, v, layout)
        assert isinstance(out, Tensor)
        return out.square().sum()

    wanted = torch.autograd.grad(loss(q, k, v), (q, k, v))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for found, grad in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(found, grad)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F64])
def test_the_operator_is_registered_as_torch_asks(dtype: torch.dtype) -> None:
    layout = band(20)
    q, k, v = inputs(20, dtype)
    sizes = [layout.block, layout.query_len, layout.key_len]
    arguments = (q, k, v, layout.tensors(), sizes, None, torch.randn(1, 1, 1, 20, dtype=dtype), 0.25, 0.0, 0)
    torch.library.opcheck(torch.ops.dsx.block_attention.default, arguments)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": torch.zeros(1, 2, 40, 8)}, r"q is \[batch, heads, query_len, dim\].*\[1, 2, 40, 8\]"),
        ({"q": torch.zeros(1, 3, 40, 16)}, "heads are no multiple of key heads"),
        ({"k": torch.zeros(1, 2, 40, 16).bfloat16()}, "k is torch.bfloat16 on cpu, q torch.float32 on cpu: convert"),
        ({"q": torch.zeros(1, 2, 39, 16)}, "the layout is for 40 queries and 40 keys, q has 39"),
        ({"q": torch.zeros(1, 4, 40, 16)}, r"the layout's heads are \[2\], not \[4\] or \[1, 4\]"),
        ({"key_padding": torch.zeros(1, 40)}, "torch.float32.*not torch.bool.*True where a key may be attended to"),
        ({"bias": torch.zeros(40, 40, dtype=torch.bool)}, "a mask of bools is no bias: give pairs by the layout"),
        ({"bias": torch.zeros(3, 40, 40)}, r"does not broadcast to numbers \[1, 2, 40, 40\]"),
        ({"dropout": 1.0}, r"dropout 1.0 is not within \[0, 1\)"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words: str) -> None:
    tensors = {name: torch.zeros(1, 2, 40, 16) for name in "qkv"}
    with pytest.raises(ValueError, match=words):
        block_attention(**{**tensors, "layout": band(40), **change})


def test_blocks_are_dropped_full_or_partial() -> None:
    layout = layout_of(torch.ones(4, 4, dtype=torch.bool), 60, causal=True, window=40)
    assert layout.columns.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
    kinds = layout.kinds.tolist()
    assert kinds == [CAUSAL, FULL, CAUSAL, WINDOW, FULL, CAUSAL, WINDOW, WINDOW, FULL, CAUSAL]
    i = torch.arange(60)
    distance = i[:, None] - i
    assert torch.equal(layout.mask(), ((distance >= 0) & (distance < 40)).expand(2, 60, 60))


def test_segments_make_lists_for_each_of_the_batch() -> None:
    segments = torch.tensor([[0] * 16 + [1] * 24, [0] * 40])
    layout = layout_of(torch.ones(3, 3, dtype=torch.bool), 40, query_segments=segments)
    assert layout.heads.tolist() == [[0, 0], [1, 1]]
    assert layout.columns.tolist() == [0, 1, 2, 1, 2, *[0, 1, 2] * 3] and not layout.kinds.any()
    same = segments[:, :, None] == segments[:, None]
    assert torch.equal(layout.mask(), same[:, None].expand(2, 2, 40, 40))


def test_transposed_lists_name_the_same_blocks() -> None:
    layout = BlockLayout.from_blocks(torch.rand(3, 5, 7) > 0.5, block=16, query_len=80, key_len=100, heads=[2, 0, 1])
    rows, groups = layout.places()
    found = []
    for group in range(3):
        for column in range(7):
            for place in range(
                int(layout.column_offsets[group, column]), int(layout.column_offsets[group, column + 1])
            ):
                entry = int(layout.entries[place])
                assert int(layout.columns[entry]) == column and int(groups[entry]) == group
                assert int(layout.rows[place]) == int(rows[entry])
                found.append(entry)
    assert sorted(found) == list(range(layout.columns.numel()))


def _lists(**change: Any) -> dict[str, Any]:
    int32 = torch.int32
    return {
        "block": 16,
        "query_len": 32,
        "key_len": 32,
        "offsets": torch.tensor([[0, 1, 3]], dtype=int32),
        "columns": torch.tensor([0, 0, 1], dtype=int32),
        "kinds": torch.zeros(3, dtype=torch.uint8),
        "heads": torch.zeros(2, dtype=int32),
        **change,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block": 20}, "blocks of 20 tokens; there are 16, 32, 64, 128"),
        ({"columns": torch.tensor([0, 0, 1])}, "columns are torch.int64, not torch.int32"),
        ({"query_len": 50}, r"offsets are \[1, 3\], not \[1, 5\] for these lengths"),
        ({"kinds": torch.zeros(2, dtype=torch.uint8)}, "2 kinds for 3 columns"),
        ({"offsets": torch.tensor([[0, 1, 2]], dtype=torch.int32)}, "do not cut the columns into list after list"),
        ({"columns": torch.tensor([0, 0, 2], dtype=torch.int32)}, "a column is not among 2 key blocks"),
        ({"columns": torch.tensor([0, 1, 0], dtype=torch.int32)}, "columns are not ascending in each list"),
        ({"heads": torch.tensor([0, 1], dtype=torch.int32)}, "name a group that is not among 1"),
        ({"kinds": torch.full((3,), 16, dtype=torch.uint8)}, "a kind has an unknown condition"),
        ({"kinds": torch.full((3,), SEGMENTS, dtype=torch.uint8)}, r"segments are \[1, 0\] and \[1, 0\] for 32 and 32"),
        ({"kinds": torch.full((3,), BITS, dtype=torch.uint8)}, r"bits are \[0, 0, 0\], not \[masks, 16, 2\]"),
        ({"windows": torch.zeros(2, dtype=torch.int32)}, r"windows are \[2\], not one a group"),
    ],
)
def test_lists_that_contradict_each_other_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"block layout: .*{words}"):
        BlockLayout(**_lists(**change))
