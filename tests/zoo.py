"""Small random models of the kinds that people train, each with the data of a (step, micro-batch, rank)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

from dsx.testing.models import VOCABULARY, tokens
from dsx_text import gpt

Batch = Mapping[str, Tensor]
ENDS = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
"""No text ends before it is as long as asked for."""


@frozen
class Kind:
    """A model that takes a batch as keyword arguments and returns something with `loss`.

    make   the same values whenever it is called, in fp32
    batch  (step, micro-batch, rank) -> its arguments
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]


def texts(step: int, micro: int, rank: int) -> Batch:
    """Tokens and labels, int64 [2, 7]."""
    inputs, labels = tokens(step, micro, rank)
    return {"input_ids": inputs.contiguous(), "labels": labels.contiguous()}


def vectors(step: int, micro: int, rank: int) -> Batch:
    """fp32 [4, 9], and classes of 5."""
    generator = torch.Generator().manual_seed(1_000 * step + 10 * micro + rank)
    inputs = torch.randn(4, 9, generator=generator)
    return {"inputs": inputs, "labels": torch.randint(0, 5, (4,), generator=generator)}


class Classifier(nn.Module):
    """The loss of a network that tells classes apart."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        return {"loss": functional.cross_entropy(self.body(inputs), labels)}


def mlp() -> nn.Module:
    """Odd widths; a layer of one row, fewer than ranks."""
    widths = (9, 13, 1, 7, 5)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return Classifier(nn.Sequential(*layers))


def convolution() -> nn.Module:
    """Batch norm: statistics of a rank's own micro-batch, and running ones that stay the rank's own."""
    return Classifier(
        nn.Sequential(
            *(nn.Unflatten(1, (1, 9)), nn.Conv1d(1, 3, 3), nn.BatchNorm1d(3), nn.ReLU()),
            *(nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.Flatten(), nn.Linear(20, 5)),
        )
    )


class Sequences(nn.Module):
    """torch's own layers: attention with a weight-normed projection, and a recurrent one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        layer = nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(12, 5, num_layers=2, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(5, VOCABULARY))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        hidden, _ = self.recurrent(self.encoder(self.embedding(input_ids)))
        return {"loss": functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def small_gpt() -> nn.Module:
    return gpt(vocab=VOCABULARY, layers=3, width=16, heads=4, kv_heads=2, context=8)


def hugging_face(name: str, recompute: bool | None = None, **more: Any) -> nn.Module:
    """A model of `transformers` with two layers; `recompute`: its activations are, reentrantly or not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **ENDS, **more)
        head = {"T5": "T5ForConditionalGeneration", "GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name]
        model: nn.Module = getattr(transformers, head)(config)
        if recompute is not None:
            model.gradient_checkpointing_enable({"use_reentrant": recompute})  # type: ignore[operator]
    return model.train()


def llama(recompute: bool | None = None) -> nn.Module:
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return hugging_face("Llama", recompute, **sizes, num_key_value_heads=2, max_position_embeddings=32, use_cache=False)


def gpt2(recompute: bool | None = None) -> nn.Module:
    """Embedding and head are tied."""
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return hugging_face("GPT2", recompute, n_layer=2, n_head=2, n_embd=16, n_positions=32, use_cache=False, **off)


def t5() -> nn.Module:
    """Encoder, decoder and head share their embedding, and layers a bias of attention."""
    sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return hugging_face("T5", **sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)


class EncoderOnly(nn.Module):
    """T5's encoder without its decoder: the embedding has two names, both of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        import transformers

        sizes: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0.0)
        self.encoder, self.head = transformers.T5EncoderModel(config), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Mapping[str, Tensor]:
        hidden = self.encoder(input_ids=input_ids).last_hidden_state
        return {"loss": functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def _seeded(build: Callable[..., nn.Module], *args: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(5)
        return build(*args)

    return make


KINDS = {
    "gpt": Kind(_seeded(small_gpt), texts),
    "mlp": Kind(_seeded(mlp), vectors),
    "convolution": Kind(_seeded(convolution), vectors),
    "sequences": Kind(_seeded(Sequences), texts),
    "llama": Kind(_seeded(llama), texts),
    "llama recomputed": Kind(_seeded(llama, False), texts),
    "gpt2": Kind(_seeded(gpt2), texts),
    "gpt2 recomputed": Kind(_seeded(gpt2, True), texts),
    "t5": Kind(_seeded(t5), texts),
    "t5 encoder": Kind(_seeded(EncoderOnly), texts),
}
