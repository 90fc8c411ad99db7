"""Models of transformers attend through dsx without a change to their code."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import dsx
from dsx.errors import DsxError
from dsx.sites import find_sites
from dsx.testing import distance, largest

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
LLAMA = {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
MASK = torch.tensor([[1] * 40, [1] * 23 + [0] * 17])
IDS = torch.randint(0, 61, (2, 40), generator=torch.Generator().manual_seed(0))
WINDOW = {"use": ["sliding_window"], "sliding_window": {"window": 9, "block": 16}}


def llama(**more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **LLAMA, **more)).eval()


def bert(**more: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, intermediate_size=48, **more)).eval()


def t5() -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 61}
    config = transformers.T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).eval()


def outputs(model: Any, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Logits, and the gradient of all that the model begins with."""
    model.zero_grad()
    logits = model(**inputs).logits
    (gradient,) = torch.autograd.grad(logits[:, :20].square().mean(), model.get_input_embeddings().weight)
    return logits, gradient


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (llama, {"input_ids": IDS}),
        (llama, {"input_ids": IDS, "attention_mask": MASK}),
        (llama, {"input_ids": IDS, "attention_mask": MASK.flip(1)}),
        (bert, {"input_ids": IDS}),
        (bert, {"input_ids": IDS, "attention_mask": MASK}),
        (lambda: bert(is_decoder=True), {"input_ids": IDS, "attention_mask": MASK}),
        (t5, {"input_ids": IDS, "attention_mask": MASK, "labels": IDS[:, :30].contiguous()}),
        (llama, {"input_ids": IDS, "position_ids": torch.cat((torch.arange(15), torch.arange(25))).expand(2, -1)}),
    ],
    ids=["llama", "llama padded", "llama padded left", "bert", "bert padded", "bert decoder", "t5", "llama packed"],
)
def test_dense_is_the_models_own_attention(make: Any, inputs: dict[str, Any]) -> None:
    model = make()
    logits, gradient = outputs(model, **inputs)
    engine = dsx.prepare(model, {"attention": {"use": ["dense"], "dense": {"block": 16}}})
    found, found_gradient = outputs(engine.model, **inputs)
    keys = inputs.get("attention_mask", torch.ones(2, found.shape[1]))[:, : found.shape[1]].bool()
    keys = keys if "labels" not in inputs else torch.ones(found.shape[:2], dtype=torch.bool)
    torch.testing.assert_close(found[keys], logits[keys], rtol=1e-4, atol=2e-5)
    if bool(keys.all()):
        torch.testing.assert_close(found_gradient, gradient, rtol=1e-3, atol=2e-6)


def test_a_window_is_the_models_own_with_that_mask() -> None:
    """Mistral is a Llama with a window."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MistralConfig(**SIZES, **LLAMA, sliding_window=9)
    mistral = transformers.MistralForCausalLM(config).eval()
    model = llama()
    model.load_state_dict(mistral.state_dict())
    expected = mistral(input_ids=IDS).logits
    assert not torch.allclose(model(input_ids=IDS).logits, expected, atol=1e-3)
    engine = dsx.prepare(model, {"attention": WINDOW})
    torch.testing.assert_close(engine.model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
    engine = dsx.prepare(mistral, {"attention": {"use": ["dense"]}})
    torch.testing.assert_close(engine.model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", [{"use": ["dense"]}, WINDOW], ids=["dense", "window"])
def test_a_cache_of_keys_continues_the_sequence(attention: dict[str, Any]) -> None:
    import transformers

    engine = dsx.prepare(llama(), {"attention": attention})
    with torch.no_grad():
        whole = engine.model(input_ids=IDS).logits
        cached = {_name_of_cache(engine.model): transformers.DynamicCache(config=engine.model.config)}
        engine.model(input_ids=IDS[:, :25], **cached)
        second = engine.model(input_ids=IDS[:, 25:37], **cached)
        last = engine.model(input_ids=IDS[:, 37:38], **cached)
    torch.testing.assert_close(second.logits, whole[:, 25:37], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last.logits, whole[:, 37:38], rtol=1e-4, atol=1e-5)


def _name_of_cache(model: Any) -> str:
    """Versions of transformers differ."""
    names = inspect.signature(model.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def test_modules_that_are_not_claimed_attend_as_before() -> None:
    model = llama()
    expected = model(input_ids=IDS, attention_mask=MASK).logits
    dense = {"use": ["dense"], "dense": {"modules": ["*.layers.0.*"]}}
    engine = dsx.prepare(model, {"attention": dense})
    found = engine.model(input_ids=IDS, attention_mask=MASK).logits
    torch.testing.assert_close(found[MASK.bool()], expected[MASK.bool()], rtol=1e-4, atol=1e-5)
    assert model.config._attn_implementation == "dsx"
    engine.close()
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(input_ids=IDS, attention_mask=MASK).logits, expected)


def test_sites_are_named() -> None:
    sites = find_sites(llama())
    assert [site.name for site in sites] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert {site.kind for site in sites} == {"asks transformers' registry of attention functions"}


def test_what_an_attend_does_not_compute_is_refused() -> None:
    engine = dsx.prepare(bert(), {"attention": WINDOW})
    with pytest.raises(DsxError, match="asks its attention for attention weights"):
        engine.model(input_ids=IDS, output_attentions=True)


def test_a_pattern_of_one_sequence_is_not_for_cross_attention() -> None:
    engine = dsx.prepare(t5(), {"attention": WINDOW})
    with pytest.raises(DsxError, match="pattern of one sequence is asked for attention of 30 queries and 40 keys"):
        engine.model(input_ids=IDS, labels=IDS[:, :30].contiguous())


def test_training_moves_the_bias_of_positions() -> None:
    """T5 learns what is added to its scores."""
    plain, model = t5(), t5()
    plain(input_ids=IDS, labels=IDS).loss.backward()
    engine = dsx.prepare(model, {"attention": {"use": ["dense"]}})
    table = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    (found,) = torch.autograd.grad(engine.model(input_ids=IDS, labels=IDS).loss, model.get_parameter(table))
    torch.testing.assert_close(found, plain.get_parameter(table).grad, rtol=1e-3, atol=1e-6)


def on_rank(name: str, manifest: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of two updates in float64 on text of the rank's own, and the weights after them."""
    compile_ = torch.compile
    torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
    try:
        engine = dsx.prepare({"llama": llama, "bert": bert}[name]().double(), manifest)
        losses = []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * step + torch.distributed.get_rank())
            ids = torch.randint(0, 61, (2, 40), generator=generator)
            engine.backward(engine(input_ids=ids, attention_mask=MASK, labels=ids.masked_fill(MASK == 0, -100)))
            losses.append(engine.step().loss)
    finally:
        torch.compile = compile_  # type: ignore[assignment]
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.close()
    return losses, weights


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_patterns_go_with_sharded_parameters_and_compiled_units(ranks, name: str) -> None:
    sharded = {"attention": WINDOW, "partition": {"use": ["zero3"]}}
    expected = ranks.run(on_rank, name, {"attention": WINDOW}, world=2, timeout=200)
    for manifest in (sharded, {**sharded, "run": {"compile": True}}):
        found = ranks.run(on_rank, name, manifest, world=2, timeout=200)
        for (losses, weights), (right, exact) in zip(found, expected, strict=True):
            assert largest(losses, right) < 1e-9 and distance(weights, exact) < 1e-9
    own = ranks.run(on_rank, name, {}, world=2)[0][0]
    assert largest(own, expected[0][0]) > 1e-6  # weights that nobody trained hardly mind
