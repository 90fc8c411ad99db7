from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dsx.errors import DsxError
from dsx_text import gpt
from dsx_text.model import GPT, Attention, rotate, rotation_table

SMALL: dict[str, Any] = {"vocab": 61, "layers": 2, "width": 32, "heads": 4, "context": 24}


def small(**options: Any) -> GPT:
    torch.manual_seed(0)
    return gpt(**(SMALL | options))


def ids(batch: int = 3, tokens: int = 17) -> torch.Tensor:
    return torch.randint(61, (batch, tokens), generator=torch.Generator().manual_seed(1))


def test_logits_have_a_row_per_token_and_the_default_model_its_stated_size() -> None:
    assert small()(ids())["logits"].shape == (3, 17, 61)
    assert sum(p.numel() for p in gpt().parameters()) == 256 * 128 + 4 * (4 * 128**2 + 3 * 128 * 352 + 2 * 128) + 128


def test_loss_is_the_mean_cross_entropy_of_the_labels_that_count() -> None:
    model, x = small(), ids()
    labels = x.roll(-1, 1)
    labels[0, 3:] = -100
    logits = model(x)["logits"].detach()
    rows = [(b, t) for b in range(3) for t in range(17) if labels[b, t] != -100]
    expected = sum(-logits[b, t].log_softmax(-1)[labels[b, t]] for b, t in rows) / len(rows)
    out = model(x, labels=labels)
    assert list(out) == ["loss"]
    assert out["loss"].dtype is torch.float32
    torch.testing.assert_close(out["loss"].detach(), expected)


def test_loss_without_labels_that_count_is_zero_and_harmless() -> None:
    model = small()
    loss = model(ids(), torch.full((3, 17), -100))["loss"]
    loss.backward()
    assert loss.item() == 0.0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"kv_heads": 1, "tied": False}, {"hidden": 7}])
def test_every_parameter_learns(options: dict[str, Any]) -> None:
    model = small(**options)
    model(ids(), ids().roll(-1, 1))["loss"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = small(), small(tied=False)
    assert tied.head.weight is tied.embedding.weight
    assert untied.head.weight.data_ptr() != untied.embedding.weight.data_ptr()
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_later_tokens_never_reach_earlier_logits() -> None:
    model, x = small(kv_heads=2), ids()
    changed = x.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before, after = model(x)["logits"], model(changed)["logits"]
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


def test_grouped_queries_equal_whole_heads_with_repeated_keys_and_values() -> None:
    torch.manual_seed(0)
    grouped, whole = Attention(32, 4, 2), Attention(32, 4, 4)
    q, k, v = grouped.qkv.weight.detach().view(-1, 8, 32).split_with_sizes((4, 2, 2))
    repeated = torch.cat((q, k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)))
    whole.load_state_dict({"qkv.weight": repeated.flatten(0, 1), "out.weight": grouped.out.weight})
    x, rotation = torch.randn(2, 11, 32), rotation_table(11, 8, 10000.0, torch.device("cpu"))
    torch.testing.assert_close(grouped(x, rotation), whole(x, rotation))


def test_a_site_attends_through_the_function_that_is_bound_to_it() -> None:
    model, x = small(kv_heads=2), ids()
    before = model(x)["logits"]
    shapes: list[torch.Size] = []
    site: Any = model.blocks[1].attention
    own = site.attend

    def bound(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        shapes.extend((q.shape, k.shape, v.shape))
        return own(q, k, v, **options) if len(shapes) == 3 else torch.zeros_like(q)

    site.attend = bound
    assert torch.equal(model(x)["logits"], before)
    assert shapes == [(3, 4, 17, 8), (3, 2, 17, 8), (3, 2, 17, 8)]
    assert not torch.equal(model(x)["logits"], before)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 16)
    rotation = rotation_table(50, 16, 10000.0, torch.device("cpu"))
    turned = [rotate(x.expand(1, 1, 50, 16), rotation)[0, 0] for x in (q, k)]
    products = turned[0] @ turned[1].T
    for distance in (-30, -1, 0, 7):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-4, rtol=0)
    torch.testing.assert_close(products.diagonal(), (q @ k).expand(50), atol=1e-4, rtol=0)
    assert products[0].std() > 0.1


def test_rotation_follows_its_definition() -> None:
    x = torch.randn(1, 1, 3, 4)
    turned = rotate(x, rotation_table(3, 4, 100.0, torch.device("cpu")))
    for position in range(3):
        for pair, angle in ((0, position), (1, position / 10)):
            a, b = x[0, 0, position, pair].item(), x[0, 0, position, pair + 2].item()
            assert turned[0, 0, position, pair].item() == pytest.approx(a * math.cos(angle) - b * math.sin(angle))
            assert turned[0, 0, position, pair + 2].item() == pytest.approx(a * math.sin(angle) + b * math.cos(angle))


def test_16_bit_weights_change_the_logits_by_their_rounding_alone() -> None:
    model, x = small(context=256, width=64), torch.randint(61, (1, 256))
    exact = model(x)["logits"].detach()
    rounded = model.bfloat16()(x)
    assert rounded["logits"].dtype is torch.bfloat16
    assert F.mse_loss(rounded["logits"].float(), exact).sqrt() < 0.02 * exact.std()
    assert model(x, x)["loss"].dtype is torch.float32


def test_positions_stay_exact_in_16_bits() -> None:
    exact = rotation_table(3000, 8, 10000.0, torch.device("cpu"))
    turned = rotate(torch.ones(1, 1, 3000, 8, dtype=torch.bfloat16), exact)
    torch.testing.assert_close(turned[0, 0].float(), (exact[0] + exact[1]), atol=0.01, rtol=0)


def test_a_model_built_on_the_meta_device_becomes_the_one_built_in_memory() -> None:
    with torch.device("meta"):
        lazy = gpt(**SMALL)
    assert all(t.is_meta for t in (*lazy.parameters(), *lazy.buffers()))
    lazy.to_empty(device="cpu")
    for parameter in lazy.parameters():
        parameter.data.fill_(math.nan)
    eager = small()
    for model in (lazy, eager):
        torch.manual_seed(5)
        model.reset_parameters()
    assert lazy.head.weight is lazy.embedding.weight
    assert torch.equal(lazy(ids())["logits"], eager(ids())["logits"])


def test_initial_weights_follow_the_seed_and_the_depth() -> None:
    first, again = small(layers=8, width=128), small(layers=8, width=128)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    block: Any = first.blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(block.mlp_norm.weight, torch.ones(128))
    assert first(ids(), ids().roll(-1, 1))["loss"].item() == pytest.approx(math.log(61), rel=0.05)


def test_dropout_acts_in_training_alone() -> None:
    model, x = small(dropout=0.5), ids()
    assert not torch.equal(model(x)["logits"], model(x)["logits"])
    model.eval()
    assert torch.equal(model(x)["logits"], small()(x)["logits"])


def test_greedy_text_is_the_likeliest_token_each_time_and_may_outgrow_the_context() -> None:
    model, x = small(tied=False), ids(2, 5)
    for parameter in model.parameters():
        parameter.data.mul_(10)  # far from uniform, so that each token of the context counts
    text = model.generate(x, 25, temperature=0)
    assert text.shape == (2, 30)
    assert torch.equal(text[:, :5], x)
    for end in range(5, 30):
        logits = model(text[:, max(0, end - 24) : end])["logits"][:, -1]
        assert torch.equal(logits.argmax(-1), text[:, end])


def test_sampled_text_follows_its_generator() -> None:
    model, x = small(), ids(2, 5)
    state = torch.get_rng_state()
    first, again, other = (
        model.generate(x, 12, temperature=2.0, generator=torch.Generator().manual_seed(s)) for s in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_top_k_samples_among_the_likeliest_alone() -> None:
    model, x = small(), ids(64, 5)
    best = model(x)["logits"][:, -1].topk(2).indices
    drawn = model.generate(x, 1, temperature=9.0, top_k=2, generator=torch.Generator().manual_seed(0))[:, -1:]
    assert (drawn == best).any(-1).all()
    assert (drawn == best[:, 1:]).any()
    assert (drawn == best[:, :1]).any()
    assert model.generate(x, 1, top_k=1000).shape == (64, 6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 3}, ["heads = 3", "a divisor of width = 32"]),
        ({"heads": 32}, ["heads = 32", "even width", "width / heads is 1"]),
        ({"kv_heads": 3}, ["kv_heads = 3", "a divisor of heads = 4"]),
        ({"kv_heads": 0}, ["kv_heads = 0", "at least 1"]),
        ({"layers": 0}, ["layers = 0", "at least 1"]),
        ({"width": "wide"}, ["width = 'wide'", "a whole number"]),
        ({"vocab": 2.5}, ["vocab = 2.5", "a whole number"]),
        ({"hidden": -1}, ["hidden = -1", "change hidden in [model]"]),
        ({"dropout": 1.0}, ["dropout = 1.0", "from 0 to below 1"]),
        ({"rope_base": 0.5}, ["rope_base = 0.5", "above 1"]),
    ],
)
def test_arguments_that_do_not_fit_are_named(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DsxError) as caught:
        small(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_ids_that_do_not_fit_the_model_are_refused_in_its_words() -> None:
    model = small()
    with pytest.raises(DsxError, match=r"input_ids of shape \[1, 25\](.|\n)*context = 24(.|\n)*raise context"):
        model(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(DsxError, match=r"input_ids of shape \[7\](.|\n)*\[batch, tokens\]"):
        model(torch.zeros(7, dtype=torch.int64))
    with pytest.raises(DsxError, match=r"vocabulary of 61\n  found: ids from 3 to 61\n  remedy: set vocab"):
        model(torch.tensor([[3, 61]]))
