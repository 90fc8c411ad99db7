"""Exported folders are what `from_pretrained` of transformers loads, bit for bit."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_model
from torch import Tensor, nn

import dsx
from dsx.testing import weights_of
from parity import prepare
from zoo import gpt2, hugging_face, llama, t5, texts

transformers = pytest.importorskip("transformers")


def tied_llama() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return hugging_face("Llama", **sizes, num_attention_heads=4, tie_word_embeddings=True, use_cache=False)


MODELS = {
    "gpt2": (gpt2, "AutoModelForCausalLM"),
    "llama": (llama, "AutoModelForCausalLM"),
    "tied llama": (tied_llama, "AutoModelForCausalLM"),
    "t5": (t5, "AutoModelForSeq2SeqLM"),
}


def train(kind: str, layout: str, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint after two updates, and what the engine exports; weights by every name, and buffers."""
    model = MODELS[kind][0]()
    engine = prepare(model, layout)
    for step in range(2):
        engine.train_step([texts(step, 0, dist.get_rank())])
    engine.save(f"{folder}/checkpoint")
    engine.export(f"{folder}/live", shard_bytes=6000)
    weights = weights_of(engine)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: weights[first[id(parameter)]] for name, parameter in every}, dict(model.named_buffers())


def loaded(kind: str, folder: Path, **options: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: nn.Module = getattr(transformers, MODELS[kind][1]).from_pretrained(folder, **options)
    return model


def same(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = dict(model.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("layout", ["zero2", "zero3"])
@pytest.mark.parametrize("kind", MODELS)
def test_transformers_loads_it_bit_for_bit_cases_37_38(ranks, tmp_path: Path, kind: str, layout: str) -> None:
    """A tied head and a shared embedding are in the file once, and equal under every name."""
    expected, _ = ranks.run(train, kind, layout, str(tmp_path), world=2)[0]
    dsx.export(tmp_path / "checkpoint", tmp_path / "out")
    same(loaded(kind, tmp_path / "out"), expected)
    model = MODELS[kind][0]()
    load_model(model, tmp_path / "out" / "model.safetensors")
    same(model, expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    live = loaded(kind, tmp_path / "live")
    same(live, expected)
    assert len(list((tmp_path / "live").glob("model-*.safetensors"))) > 2
    assert (tmp_path / "live" / "generation_config.json").exists()
    dsx.export(tmp_path / "checkpoint", tmp_path / "bf16", "bfloat16")
    rounded = {name: tensor.bfloat16() for name, tensor in expected.items()}
    same(loaded(kind, tmp_path / "bf16"), rounded)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_files_are_cut_where_hugging_face_cuts_them(ranks, tmp_path: Path) -> None:
    """In the order of the model's state_dict, of which tied names but the first are left out."""
    from huggingface_hub import split_torch_state_dict_into_shards

    ranks.run(train, "gpt2", "zero3", str(tmp_path), world=2)
    tensors = gpt2().state_dict()
    del tensors["lm_head.weight"]
    expected = split_torch_state_dict_into_shards(tensors, max_shard_size=6000)
    found = json.loads((tmp_path / "live" / "model.safetensors.index.json").read_text())
    assert found == {"metadata": expected.metadata, "weight_map": expected.tensor_to_filename}
