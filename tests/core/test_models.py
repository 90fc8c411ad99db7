"""Models of other shapes than the kit's, under the null parts, against plain PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import dsx
from dsx.testing import distance, largest, train_plain, weights_of
from dsx.testing.models import Tangle, tokens

STEPS = 3


def words(step: int, micro: int, rank: int) -> tuple[Tensor, ...]:
    """Vectors of 6 and classes of 5."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    return torch.randn(3, 6, generator=generator).double(), torch.randint(0, 5, (3,), generator=generator)


class Twice(nn.Module):
    """The same encoder called twice, with activation checkpointing or without; one call's input needs no gradient."""

    def __init__(self, recompute: str = "no") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.head = nn.Linear(12, 5)
        self.recompute = recompute

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        once, again = self._encode(inputs), self._encode(inputs.flip(1))
        return functional.cross_entropy(self.head(torch.cat([once, again], 1)), classes)

    def _encode(self, inputs: Tensor) -> Tensor:
        if self.recompute == "no":
            return self.encoder(inputs)
        from torch.utils.checkpoint import checkpoint

        reentrant = self.recompute == "reentrant"
        inputs = inputs.requires_grad_() if reentrant else inputs
        return checkpoint(self.encoder, inputs, use_reentrant=reentrant)


class Mixed(nn.Module):
    """Two dtypes in one model, one of them frozen in part; outputs in a mapping with things that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.base = nn.Linear(6, 8).double()
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(6, 8, bias=False).float()
        self.head = nn.Linear(8, 5).double()

    def forward(self, inputs: Tensor, classes: Tensor) -> Any:
        hidden = self.base(inputs) + self.adapter(inputs.float()).double()
        loss = functional.cross_entropy(self.head(hidden), classes)
        return {"loss": loss, "none": None, "count": 3, "name": "mixed"}


class Convolution(nn.Module):
    """No ModuleList; batch norm, whose buffers stay local."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5))

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.body(inputs.unsqueeze(1)), classes)


class Repeated(nn.Module):
    """One block four times in the list, as ALBERT has it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        block = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([block] * 4)
        self.head = nn.Linear(6, 5)

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + torch.tanh(block(inputs))
        return functional.cross_entropy(self.head(inputs), classes)


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.table, self.head = nn.Embedding(9, 6, sparse=sparse), nn.Linear(6, 5)

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.table((inputs[:, 0].abs() * 4).long() % 9)), classes)


def _twice() -> nn.Module:
    return Twice().double()


def _recomputed() -> nn.Module:
    return Twice("recomputed").double()


def _reentrant() -> nn.Module:
    return Twice("reentrant").double()


def mixed() -> nn.Module:
    return Mixed()


def convolution() -> nn.Module:
    return Convolution().double()


def repeated() -> nn.Module:
    return Repeated().double()


def sparse() -> nn.Module:
    return Sparse().double()


def dense() -> nn.Module:
    return Sparse(sparse=False).double()


def train(make: Callable[[], nn.Module], accumulation: int) -> tuple[list[float], dict[str, Tensor]]:
    model = make()
    engine = dsx.prepare(model, {"batch": {"accumulation": accumulation}})
    rank = dist.get_rank()
    losses = [
        engine.train_step(words(step, micro, rank) for micro in range(accumulation)).loss for step in range(STEPS)
    ]
    return losses, weights_of(model)


class Loss(nn.Module):
    """Plain loops want the loss itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Tensor:
        output = self.model(*args)
        return output["loss"] if isinstance(output, dict) else output


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (_twice, _twice),
        (_recomputed, _twice),
        (_reentrant, _twice),
        (mixed, mixed),
        (repeated, repeated),
        (sparse, dense),
    ],
)
def test_two_ranks_train_like_one_process(ranks, make, plain, accumulation) -> None:
    """Case 27: one encoder called twice, recomputed or not. Case 43: several dtypes. Case 31: other outputs than
    tensors."""
    found = ranks.run(train, make, accumulation, world=2)
    model = plain()
    losses = train_plain(Loss(model), words, steps=STEPS, world=2, accumulation=accumulation)
    for rank_losses, weights in found:
        assert largest(rank_losses, losses) < 1e-7
        assert {name: tensor.dtype for name, tensor in weights.items()} == {
            name: parameter.dtype for name, parameter in model.named_parameters()
        }
        assert distance(weights, weights_of(model)) < (1e-6 if make is mixed else 1e-9)


def test_batch_norm_keeps_local_statistics(ranks) -> None:
    (losses, weights), (others, other_weights) = ranks.run(train, convolution, 1, world=2)
    assert losses == others
    assert all(torch.equal(tensor, other_weights[name]) for name, tensor in weights.items())
    (alone,) = ranks.run(train, convolution, 1, world=1)
    model = convolution()
    assert largest(alone[0], train_plain(model, words, steps=STEPS)) < 1e-12
    assert distance(alone[1], weights_of(model)) < 1e-9


def test_frozen_parameters_have_no_state() -> None:
    """Case 42."""
    engine = dsx.prepare(Mixed())
    store = engine.program.store
    for unit in engine.program.layout.units:
        for flat in unit.flats:
            expected = ["exp_avg", "exp_avg_sq"] if flat.trainable else []
            assert list(store.names(flat.key)) == expected, flat.key
    trained = sum(shard.flat.size * shard.flat.dtype.itemsize for shard in engine.program.layout.shards)
    assert store.bytes() == {"exp_avg": trained, "exp_avg_sq": trained}


def transformer(kind: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        torch.manual_seed(6)
        small = {"vocab_size": 23, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
        if kind == "llama":
            config = transformers.LlamaConfig(**small, intermediate_size=24, max_position_embeddings=32)
            return transformers.LlamaForCausalLM(config).double()
        if kind == "gpt2":
            off = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
            config = transformers.GPT2Config(vocab_size=23, n_layer=2, n_head=2, n_embd=16, n_positions=32, **off)
            return transformers.GPT2LMHeadModel(config).double()
        small = {"vocab_size": 23, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(**small, dropout_rate=0)
        return EncoderOnly(transformers.T5EncoderModel(config)).double()


class EncoderOnly(nn.Module):
    """Case 34: T5's encoder alone, whose embedding has two names."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(16, 23)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.encoder(input_ids=input_ids).last_hidden_state
        return {"loss": functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def train_transformer(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = transformer(kind)
    engine = dsx.prepare(model, {"optimize": {"clip_norm": 1.0}})
    losses = []
    for step in range(STEPS):
        inputs, targets = tokens(step, 0, dist.get_rank())
        losses.append(engine.train_step([{"input_ids": inputs, "labels": targets}]).loss)
    return losses, weights_of(model)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5 encoder"])
def test_hugging_face_models_train_unchanged(ranks, kind) -> None:
    pytest.importorskip("transformers")
    found = ranks.run(train_transformer, kind, world=2)
    model = transformer(kind)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for rank in range(2):
            inputs, targets = tokens(step, 0, rank)
            output = model(input_ids=inputs, labels=targets)
            loss = output["loss"]
            (loss / 2).backward()
            total += loss.item() / 2
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    for rank_losses, weights in found:
        assert largest(rank_losses, losses) < 1e-6
        assert distance(weights, weights_of(model)) < 1e-9


def test_a_compiled_unit_trains_the_same(monkeypatch) -> None:
    """`run.compile`: the blocks are compiled, inside core's hooks."""
    compiled = []

    def compile_(forward: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            compiled.append(forward)
            return forward(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(torch, "compile", compile_)
    model = Tangle().double()
    engine = dsx.prepare(model, {"run": {"compile": True}})
    losses = [engine.train_step([tokens(step, 0, 0)]).loss for step in range(STEPS)]
    plain = Tangle().double()
    assert largest(losses, train_plain(plain, tokens, steps=STEPS)) == 0
    assert len(compiled) == STEPS * len(plain.blocks)


@pytest.mark.parametrize("precision", [[], ["bf16"]])
@pytest.mark.parametrize("layout", [[], ["zero1"], ["zero2"]])
def test_gathered_edits_reach_every_rank(ranks, layout: list[str], precision: list[str]) -> None:
    """Masters too, and frozen parameters; rank 0's edit counts, under a name that is not the parameter's first."""
    manifest = {"partition": {"use": layout}, "precision": {"use": precision}}
    for embedding, frozen, moved in ranks.run(edit, manifest, world=3):
        assert torch.equal(embedding, torch.full_like(embedding, 0.5))
        assert torch.equal(frozen, torch.full_like(frozen, 0.5))
        assert 0 < moved < 0.1  # the next update starts from the edit


def edit(manifest: dict[str, Any]) -> tuple[Tensor, Tensor, float]:
    model = Tangle()
    engine = dsx.prepare(model, manifest)
    with engine.gathered(["head.weight", "frozen.weight"], modify=True), torch.no_grad():
        model.embedding.weight.fill_(0.5 + dist.get_rank())
        model.frozen.weight.fill_(0.5 + dist.get_rank())
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.train_step([tokens(0, 0, dist.get_rank())])
    after = dict(engine.weights())["embedding.weight"]
    return weights["embedding.weight"], weights["frozen.weight"], (after - 0.5).abs().max().item()
