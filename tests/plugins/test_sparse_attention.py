"""Attention by patterns: outputs and gradients against an explicit mask in float64; composition; refusals."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsx
from dsx.contracts import Attend
from dsx.errors import DsxError, SlotConflict
from dsx.testing import check_plugin, distance, largest
from dsx.testing.models import Attentive, tokens
from dsx_sparse import dense, document, sliding_window, streaming
from dsx_sparse.attend import LAYOUTS, attend_by
from dsx_sparse.cache import Layouts
from dsx_sparse.layout import layout
from dsx_sparse.pattern import Pattern
from dsx_sparse.region import Shape
from dsx_text import gpt
from sparse_patterns import PATTERNS, WINDOW


def explicit(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, added: Tensor | None = None) -> Tensor:
    """softmax in float64 over the pairs that are allowed; zeros for queries without any."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5 + (0 if added is None else added)
    scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.where(allowed.any(-1, keepdim=True), torch.softmax(scores, -1), 0).nan_to_num() @ v


def tensors(length: int, dtype: torch.dtype, heads: int = 4, kv_heads: int = 2, dim: int = 32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    sizes = (heads, kv_heads, kv_heads)
    each = [torch.randn(2, length, n, dim, generator=generator, dtype=torch.float64) for n in sizes]
    return [tensor.to(dtype).transpose(1, 2).requires_grad_() for tensor in each]


def mask_of(pattern: Pattern, length: int, causal: bool, heads: int = 4) -> Tensor:
    shape = Shape(heads, length, length, pattern.block, causal)
    return layout(shape, pattern.region(shape)).mask()


def both(attend: Attend, allowed: Tensor, inputs: list[Tensor], added: Tensor | None = None, **call: Any) -> float:
    """The worst error of the output and of each gradient against `explicit`: of its largest number, and in norm."""
    found = attend(*inputs, **call)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    expected = explicit(*wide, allowed, added)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gradients = torch.autograd.grad((found.double() * weights).sum(), inputs)
    right = torch.autograd.grad((expected * weights).sum(), wide)
    return max(map(error, (found, *gradients), (expected, *right)))


def error(found: Tensor, expected: Tensor) -> float:
    """Zeros, such as the gradients of scores where a query has one key, are held against one."""
    if not expected.numel():
        return 0.0
    off, expected = found.detach().double() - expected.detach(), expected.detach()
    pairs = ((off.abs().max(), expected.abs().max()), (off.norm(), expected.norm()))
    return max(float(wrong / (size or 1)) for wrong, size in pairs)


def _flat(*tensors: Tensor) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("name", PATTERNS)
def test_outputs_and_gradients_are_those_of_the_explicit_mask(name: str, causal: bool) -> None:
    """Cases 111 and 112: blocks of 16, and lengths that are no multiple of them."""
    pattern = PATTERNS[name]
    attend = attend_by(name, pattern)
    for length in (0, 1, 17, 128, 333):
        allowed = mask_of(pattern, length, causal)
        assert both(attend, allowed, tensors(length, torch.float32), causal=causal) < 1e-5, length
    assert both(attend, mask_of(pattern, 97, causal), tensors(97, torch.float64), causal=causal) < 1e-12
    assert both(attend, mask_of(pattern, 97, causal), tensors(97, torch.bfloat16), causal=causal) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_lay_in_memory_before_does_not_show(dtype: torch.dtype) -> None:
    """Blocks that are cut short at the end of a sequence are computed whole."""
    attend, inputs = attend_by("sliding_window", WINDOW), tensors(7, dtype)
    found = []
    for _ in range(20):
        junk = [torch.full((16 << size % 10,), torch.nan) for size in range(40)]
        del junk
        out = attend(*inputs, causal=True)
        found.append(_flat(out, *torch.autograd.grad(out.sum(), inputs)))
    assert bool(found[0].isfinite().all()) and all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("name", PATTERNS)
def test_long_sequences_that_are_no_multiple_of_a_block(name: str) -> None:
    """Case 112; the operation's own tests have 4097 for all kinds of blocks."""
    inputs = tensors(1025, torch.float32, heads=2, kv_heads=1, dim=16)
    allowed = mask_of(PATTERNS[name], 1025, True, heads=2)
    assert both(attend_by(name, PATTERNS[name]), allowed, inputs, causal=True) < 1e-5


def test_masks_count_within_the_pattern() -> None:
    """Case 114: a sequence whose keys are all masked gives zeros, and gradients of zero."""
    length, attend = 60, attend_by("sliding_window", WINDOW)
    allowed = mask_of(WINDOW, length, True)
    padding = torch.rand(2, 1, 1, length, generator=torch.Generator().manual_seed(0)) > 0.3
    padding[1] = False
    pairs = torch.rand(2, 4, length, length, generator=torch.Generator().manual_seed(0)) > 0.3
    added = torch.randn(1, 4, length, length, generator=torch.Generator().manual_seed(0))
    cases = {
        "padding": (padding, allowed & padding, None),
        "padding of every query": (padding.expand(2, 4, length, length), allowed & padding, None),
        "pairs": (pairs, allowed & pairs, None),
        "pairs of all heads": (pairs[0, 0], allowed & pairs[0, 0], None),
        "added": (added, allowed.expand(2, -1, -1, -1), added.double()),
        "added padding": (torch.zeros(padding.shape).masked_fill(~padding, -torch.inf), allowed & padding, None),
    }
    for name, (mask, pairs, bias) in cases.items():
        inputs = tensors(length, torch.float32)
        assert both(attend, pairs, inputs, bias, mask=mask, causal=True) < 1e-5, name
    q, k, v = tensors(length, torch.float32)
    out = attend(q, k, v, padding, causal=True)
    out.sum().backward()
    assert not bool(out[1].any()) and not any(bool(tensor.grad[1].any()) for tensor in (q, k, v))


def test_what_is_added_has_a_gradient() -> None:
    attend, allowed = attend_by("dense", PATTERNS["dense"]), torch.ones(4, 40, 40, dtype=torch.bool)
    inputs = tensors(40, torch.float64)
    added = torch.randn(1, 4, 40, 40, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad(attend(*inputs, added).square().sum(), added)
    (expected,) = torch.autograd.grad(explicit(*inputs, allowed, added).square().sum(), added)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pattern", ["sliding_window", "document"])
def test_segments_are_sequences_of_their_own(pattern: str) -> None:
    ids = torch.tensor([[3] * 21 + [4] * 30 + [9] * 19, [0] * 70])
    options: Pattern = WINDOW if pattern == "sliding_window" else document.Options(block=16)
    attend = attend_by(pattern, options)
    inner = mask_of(options if pattern == "sliding_window" else dense.Options(block=16), 70, True)
    allowed = inner & (ids[:, None, :, None] == ids[:, None, None])
    assert both(attend, allowed, tensors(70, torch.float32), causal=True, segments=ids) < 1e-5


def test_dropout_is_drawn_anew_and_repeats_with_the_generator() -> None:
    attend = attend_by("dense", PATTERNS["dense"])
    q, k, v = tensors(64, torch.float32)
    torch.manual_seed(3)
    first, second = attend(q, k, v, dropout=0.25), attend(q, k, v, dropout=0.25)
    torch.manual_seed(3)
    again = attend(q, k, v, dropout=0.25)
    assert torch.equal(first, again) and not torch.equal(first, second)
    ones = attend(q, k, torch.ones_like(v), dropout=0.25).detach()
    assert abs(float(ones.mean()) - 1) < 0.02 and float(ones.std()) > 0.01
    first.sum().backward()
    gradient = q.grad.clone()
    q.grad = None
    again.sum().backward()
    assert torch.equal(q.grad, gradient)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"mask": torch.ones(60, 60, dtype=torch.int64)}, "an attention mask has dtype int64"),
        ({"mask": torch.ones(2, 60, dtype=torch.bool)}, r"an attention mask has shape \[2, 60\]"),
        ({"segments": torch.zeros(2, 59, dtype=torch.int64)}, r"segment ids are int64 \[2, 59\]"),
        ({"segments": torch.zeros(2, 60)}, "segment ids are float32"),
    ],
)
def test_arguments_of_another_meaning_are_refused(call: dict[str, Any], words: str) -> None:
    with pytest.raises(DsxError, match=words):
        attend_by("sliding_window", WINDOW)(*tensors(60, torch.float32), **call)


def test_patterns_that_cannot_serve_a_call_say_so() -> None:
    q, k, v = tensors(60, torch.float32)
    with pytest.raises(DsxError, match="asked for attention of 30 queries and 60 keys") as caught:
        attend_by("sliding_window", WINDOW)(q[:, :, :30], k, v)
    assert "[attention.sliding_window]" in str(caught.value) and "`dense`" in str(caught.value)
    with pytest.raises(DsxError, match="60 queries and 30 keys"):
        attend_by("sliding_window", WINDOW)(q, k[:, :, :30], v[:, :, :30], causal=True)
    with pytest.raises(DsxError, match="a pattern of documents is asked for attention without segment ids"):
        attend_by("document", document.Options())(q, k, v)
    cross = attend_by("dense", PATTERNS["dense"])(q[:, :, :30], k, v)
    torch.testing.assert_close(cross, explicit(q[:, :, :30], k, v, torch.ones(30, 60, dtype=torch.bool)))


def test_a_layout_is_made_once_for_everything_that_it_depends_on() -> None:
    """Case 115: a layout made for one length is not used at another; there are never more than the cache holds."""
    kept = Layouts(most=3)
    cpu = torch.device("cpu")
    streams = streaming.Options(sinks=4, recent=32, block=16)
    key = repr(streams)
    long = kept.get(streams, key, Shape(2, 256, 256, 16, True), None, cpu)
    short = kept.get(streams, key, Shape(2, 64, 64, 16, True), None, cpu)
    assert (long.key_len, short.key_len) == (256, 64)
    assert kept.get(streams, key, Shape(2, 64, 64, 16, True), None, cpu) is short
    assert kept.get(streams, key, Shape(2, 64, 64, 16, False), None, cpu) is not short
    ids = torch.zeros(1, 64, dtype=torch.int64)
    one = kept.get(streams, key, Shape(2, 64, 64, 16, True), ids, cpu)
    ids[0, 40:] = 1
    other = kept.get(streams, key, Shape(2, 64, 64, 16, True), ids, cpu)
    assert not torch.equal(one.mask(), other.mask()) and len(kept) == 3
    assert kept.get(streams, key, Shape(2, 256, 256, 16, True), None, cpu) is not long
    small = Layouts(most_bytes=1)
    small.get(streams, key, Shape(2, 64, 64, 16, True), None, cpu)
    small.get(streams, key, Shape(2, 96, 96, 16, True), None, cpu)
    assert len(small) == 1


def losses(manifest: dict[str, Any], lengths: list[int], **sizes: Any) -> list[float]:
    torch.manual_seed(0)
    model = gpt(vocab=32, layers=2, width=32, heads=4, kv_heads=2, context=512, **sizes).double()
    engine = dsx.prepare(model, manifest)
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in lengths:
        ids = torch.randint(0, 32, (2, length), generator=generator)
        engine.backward(engine(ids, ids))
        found.append(engine.step().loss)
    engine.close()
    return found


TWO = {
    "use": ["sliding_window", "streaming"],
    "sliding_window": {"modules": ["blocks.0.*"], "window": 9, "block": 16},
    "streaming": {"modules": ["blocks.1.*"], "sinks": 2, "recent": 5, "block": 16},
}
LENGTHS = [64, 100, 33, 64, 201, 90]


def plainly(lengths: list[int], masks: list[Pattern]) -> list[float]:
    """The same training with explicit masks in the model's own attention."""
    torch.manual_seed(0)
    model = gpt(vocab=32, layers=2, width=32, heads=4, kv_heads=2, context=512).double()

    def attend(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, *_: Any, **choices: Any) -> Tensor:
        return explicit(q, k, v, mask_of(pattern, q.shape[2], choices["causal"]))

    for block, pattern in zip(model.blocks, masks, strict=True):
        block.attention.attend = partial(attend, pattern)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in lengths:
        ids = torch.randint(0, 32, (2, length), generator=generator)
        loss = model(ids, ids)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_two_patterns_and_changing_lengths_train_as_explicit_masks() -> None:
    expected = plainly(
        LENGTHS,
        [sliding_window.Options(window=9, block=16), streaming.Options(sinks=2, recent=5, block=16)],
    )
    assert largest(losses({"attention": TWO}, LENGTHS), expected) < 1e-7


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_units_do_not_compile_again_for_other_lengths() -> None:
    """Once for the first length, once for any: layouts are looked up when the graph runs."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compile_ = torch.compile
    torch.compile = partial(torch.compile, backend=counter, fullgraph=True)  # type: ignore[assignment]
    try:
        found = losses({"attention": TWO, "run": {"compile": True}}, LENGTHS)
        made = counter.frame_count
        losses({"attention": TWO, "run": {"compile": True}}, [50, 77, 120])
        assert counter.frame_count == made <= 4
    finally:
        torch.compile = compile_  # type: ignore[assignment]
        torch._dynamo.reset()
    assert largest(found, losses({"attention": TWO}, LENGTHS)) < 1e-9


def test_changing_lengths_keep_no_memory() -> None:
    attend = attend_by("sliding_window", WINDOW)
    for length in range(2, 200):
        attend(*(torch.zeros(1, 1, length, 8) for _ in range(3)), causal=True)
    gc.collect()
    assert len(LAYOUTS) <= 128


def test_a_site_of_two_patterns_is_a_conflict() -> None:
    with pytest.raises(SlotConflict, match=r"'dense' and 'sliding_window' both claim the attention of 'blocks\.0"):
        losses({"attention": {"use": ["dense", "sliding_window"]}}, [])


def test_names_that_match_no_site_are_refused() -> None:
    given = {"use": ["dense"], "dense": {"modules": ["blocks.0.*", "blocks.1.atention"]}}
    with pytest.raises(DsxError, match=r"no attention site of the model matches 'blocks\.1\.atention'") as caught:
        losses({"attention": given}, [])
    assert "did you mean 'blocks.1.attention'?" in str(caught.value)


def test_a_pattern_keeps_the_contracts_on_two_ranks(ranks) -> None:
    check_plugin("bigbird", {"block": 16}, ranks=ranks)


def on_rank(manifest: dict[str, Any], model: type[nn.Module]) -> tuple[list[float], dict[str, Tensor]]:
    compile_ = torch.compile
    torch.compile = partial(torch.compile, backend="aot_eager", fullgraph=True)  # type: ignore[assignment]
    try:
        engine = dsx.prepare(model().double(), manifest)
        found = []
        for step in range(3):
            engine.backward(engine(*tokens(step, 0, torch.distributed.get_rank())))
            found.append(engine.step().loss)
    finally:
        torch.compile = compile_  # type: ignore[assignment]
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.close()
    return found, weights


@pytest.mark.parametrize("compile_units", [False, True], ids=["eager", "compiled"])
def test_attention_goes_with_sharded_parameters(ranks, compile_units: bool) -> None:
    window = {"use": ["sliding_window"], "sliding_window": {"window": 3, "block": 16}}
    sharded = {"attention": window, "partition": {"use": ["zero3"]}, "run": {"compile": compile_units}}
    expected = ranks.run(on_rank, {"attention": window}, Attentive, world=2, timeout=200)
    found = ranks.run(on_rank, sharded, Attentive, world=2, timeout=200)
    for (losses_, weights), (right, exact) in zip(found, expected, strict=True):
        assert largest(losses_, right) < 1e-9 and distance(weights, exact) < 1e-9
    dense_losses = ranks.run(on_rank, {}, Attentive, world=2)[0][0]
    assert largest(dense_losses, expected[0][0]) > 1e-4
