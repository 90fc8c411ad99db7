"""`dsx.empty_init`: what a constructor would have made, bit for bit, or an error that names what cannot be."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import dsx
from dsx.deferred.held import held
from dsx.deferred.on_meta import OnMeta
from dsx.errors import DsxError
from dsx.manifest import Target
from dsx.run.job import run
from dsx.run.targets import make_model
from dsx.testing.models import Attentive, Tangle
from dsx.testing.plain import weights_of
from zoo import KINDS


def built(make: Callable[[], nn.Module], empty: bool) -> tuple[nn.Module, Tensor]:
    """A model, and the random numbers drawn after it."""
    torch.manual_seed(3)
    if not empty:
        return make(), torch.rand(20)
    with dsx.empty_init():
        model = make()
    return model, torch.rand(20)


def same(make: Callable[[], nn.Module]) -> nn.Module:
    """Prepare a model that was built without memory, and compare every tensor with the real one's."""
    real, after = built(make, empty=False)
    model, after_empty = built(make, empty=True)
    assert torch.equal(after, after_empty)
    expected = {name: tensor.detach().clone() for name, tensor in held(real)}
    assert all(tensor.is_meta for _, tensor in held(model))
    engine = dsx.prepare(model)
    found = dict(held(model))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensor.dtype == found[name].dtype, name
        torch.testing.assert_close(found[name].detach(), tensor, rtol=0, atol=0, equal_nan=True, msg=name)
    engine.close()
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_models_are_what_their_constructors_make(kind: str) -> None:
    same(KINDS[kind].make)


@pytest.mark.parametrize("make", [Tangle, Attentive])
def test_ties_survive(make: Callable[[], Tangle]) -> None:
    """Case 39: tied, frozen, empty, 0-dim and (1, 17) parameters, a buffer."""
    model = same(make)
    assert model.head.weight is model.embedding.weight
    assert not model.frozen.weight.requires_grad


class Holder(nn.Module):
    """A module with one trainable parameter, to which tests attach what they are about."""

    def __init__(self, fill: Callable[[Any], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        fill(self)


def parameter(make: Callable[[], Tensor]) -> Callable[[Any], object]:
    return lambda module: setattr(module, "made", nn.Parameter(make()))


def buffer(make: Callable[[], Tensor]) -> Callable[[Any], object]:
    return lambda module: module.register_buffer("made", make())


def generated(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(9)
    torch.randn(3, generator=generator)
    return torch.randn(size, generator=generator).uniform_(generator=generator)


def transposed() -> Tensor:
    """Parts of one memory, filled in several orders."""
    whole = torch.empty(5, 8)
    whole[0].normal_()
    whole[1:].uniform_()
    whole.t_()
    whole[2, 1] = 7.0
    return whole


MADE: dict[str, Callable[[Any], object]] = {
    "orthogonal, wide": parameter(lambda: nn.init.orthogonal_(torch.empty(5, 9))),
    "orthogonal, tall": parameter(lambda: nn.init.orthogonal_(torch.empty(9, 5))),
    "truncated normal": parameter(lambda: nn.init.trunc_normal_(torch.empty(9, 5), std=0.02)),
    "sparse": parameter(lambda: nn.init.sparse_(torch.empty(6, 6), 0.5)),
    "15 elements": parameter(lambda: torch.empty(15).normal_()),
    "16 elements": parameter(lambda: torch.empty(16).normal_()),
    "17 elements": parameter(lambda: torch.randn(17)),
    "a generator, 15": parameter(lambda: generated(15)),
    "a generator, 40": parameter(lambda: generated(40)),
    "views": parameter(transposed),
    "dropout": parameter(lambda: nn.functional.dropout(torch.ones(30), 0.4)),
    "probabilities": parameter(lambda: torch.bernoulli(torch.rand(30))),
    "means": parameter(lambda: torch.normal(torch.arange(20.0), torch.rand(20))),
    "permutation": parameter(lambda: torch.randperm(7).float()),
    "choice": parameter(lambda: torch.multinomial(torch.rand(9), 3).float()),
    "item": parameter(lambda: torch.full((3,), torch.rand(4)[2].item())),
    "list": parameter(lambda: torch.tensor(torch.linspace(0, 1, 5).tolist())),
    "array": parameter(lambda: torch.tensor(torch.rand(5).numpy())),
    "branch": parameter(lambda: torch.ones(2) if torch.rand(3).sum() > 9 else torch.zeros(2)),
    "equal": parameter(lambda: torch.ones(2) * torch.equal(torch.ones(3), torch.ones(3))),
    "converted": parameter(lambda: torch.rand(5).double().to(torch.bfloat16)),
    "indices": buffer(lambda: torch.nonzero(torch.rand(20) > 0.5)),
    "distinct": buffer(lambda: torch.unique(torch.randint(0, 5, (20,)))),
    "complex": buffer(lambda: torch.polar(torch.ones(3), torch.arange(3.0)).conj()),
    "decomposed": buffer(lambda: torch.linalg.svd(torch.randn(5, 3))[0]),
    "uninitialised and filled": buffer(lambda: torch.empty(7).copy_(torch.rand(7))),
    "padding": lambda module: setattr(module, "made", nn.Embedding(9, 4, padding_idx=2)),
    "halves": lambda module: setattr(module, "made", nn.ParameterList(map(nn.Parameter, torch.randn(6, 4).chunk(2)))),
    "bfloat16": lambda module: setattr(module, "made", nn.Linear(5, 5, dtype=torch.bfloat16)),
    "half": lambda module: setattr(module, "made", nn.Linear(5, 5).half().float()),
    "orthogonal layer": lambda module: setattr(module, "made", parametrizations.orthogonal(nn.Linear(4, 4))),
    "spectral norm": lambda module: setattr(module, "made", parametrizations.spectral_norm(nn.Linear(4, 3))),
    "copies": lambda module: setattr(module, "made", copy.deepcopy(nn.Linear(3, 4))),
    "an attribute": lambda module: setattr(module, "made", torch.tril(torch.rand(4, 4))),
    "attributes": lambda module: setattr(module, "made", {"a": [torch.rand(2), torch.arange(3)], 1: (torch.ones(1),)}),
    "a parameter of nobody": lambda module: setattr(module, "made", [nn.Parameter(torch.rand(3))]),
    "many": lambda module: torch._foreach_add_([module.weight.data], 2.0),
}


@pytest.mark.parametrize("what", MADE)
def test_what_constructors_do_is_done_later(what: str) -> None:
    same(lambda: Holder(MADE[what]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_is_that_of_the_constructor(dtype: torch.dtype) -> None:
    def make() -> nn.Module:
        torch.set_default_dtype(dtype)
        try:
            table = buffer(lambda: torch.arange(4) / 3)
            return nn.Sequential(nn.Linear(7, 5), nn.LSTM(5, 3), Holder(table))
        finally:
            torch.set_default_dtype(torch.float32)

    model = same(make)
    assert {tensor.dtype for _, tensor in held(model)} == {dtype}


def test_a_tensor_says_which_device_it_was_asked_for() -> None:
    def check(module: Any) -> None:
        assert (module.weight.device, module.weight.is_meta, module.weight.is_cpu) == (torch.device("cpu"), False, True)
        module.made = nn.Parameter(torch.zeros(3, device=module.weight.device).to(module.weight.device))
        assert torch.empty(1, device="meta").is_meta

    same(lambda: Holder(check))


def test_views_of_one_memory_stay_so() -> None:
    def fill(module: Any) -> None:
        table = torch.rand(2, 5)
        module.register_buffer("cos", table[0])
        module.register_buffer("both", table, persistent=False)

    model = same(lambda: Holder(fill))
    model.both.zero_()
    assert model.cos.sum() == 0


def test_attributes_and_classes_of_parameters_stay() -> None:
    class Marked(nn.Parameter):
        pass

    def fill(module: Any) -> None:
        module.made = Marked(torch.rand(3))
        module.made.decay = False
        module.same = [module.made]

    model = same(lambda: Holder(fill))
    assert type(model.made) is Marked and model.made.decay is False
    assert model.same[0] is model.made


def test_hooks_of_parameters_stay() -> None:
    calls: list[str] = []

    def fill(module: Any) -> None:
        module.weight.register_hook(lambda gradient: calls.append("gradient"))
        module.weight.register_post_accumulate_grad_hook(lambda weight: calls.append("accumulated"))

    model, _ = built(lambda: Holder(fill), empty=True)
    engine = dsx.prepare(model)
    engine.backward(model.weight.sum())
    assert calls == ["gradient", "accumulated"]


def test_a_second_context_changes_a_model() -> None:
    def change(model: nn.Module) -> nn.Module:
        for weight in model.parameters():
            weight.data.mul_(2)
        return model.bfloat16()

    torch.manual_seed(0)
    expected = weights_of(change(nn.Linear(3, 4)))
    torch.manual_seed(0)
    with dsx.empty_init(), dsx.empty_init():
        model = nn.Linear(3, 4)
    with dsx.empty_init():
        change(model)
    found = weights_of(dsx.prepare(model))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


OUTSIDE: list[tuple[str, Callable[[Any], object]]] = [
    ("data", lambda model: model.weight.data.normal_()),
    ("data", copy.deepcopy),
    ("zero_", lambda model: nn.init.zeros_(model.weight)),
    ("to", lambda model: model.to(torch.bfloat16)),
    ("detach", lambda model: model.state_dict()),
    ("add", lambda model: model.weight + 1),
    ("mul_", lambda model: model.running.mul_(2)),
]


@pytest.mark.parametrize(("name", "change"), OUTSIDE)
def test_changes_outside_the_context_are_refused(name: str, change: Callable[[Any], object]) -> None:
    with dsx.empty_init():
        model = Holder(lambda module: module.register_buffer("running", torch.ones(2)))
    with pytest.raises(DsxError) as caught:
        change(model)
    assert f"{name}` was called on a tensor of a model that has no memory yet" in str(caught.value)
    assert "do it within `with dsx.empty_init():`, or after dsx.prepare" in str(caught.value)


def test_what_needs_no_values_can_be_asked_outside() -> None:
    with dsx.empty_init():
        model = Tangle()
    assert sum(weight.numel() for weight in model.parameters()) == sum(p.numel() for p in Tangle().parameters())
    assert model.head.weight.shape == (23, 17) and model.head.weight.dtype == torch.float32
    model.frozen.requires_grad_(True)
    repr(model.head.weight)
    engine = dsx.prepare(model)
    assert "frozen.weight" in engine.program.parameters


def refused(model: nn.Module, **choices: Any) -> str:
    with pytest.raises(DsxError) as caught:
        dsx.prepare(model, **choices)
    return str(caught.value)


def test_a_model_on_the_meta_device_has_no_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    text = refused(model)
    assert "7 tensors of the model are on the meta device, and nobody knows their values" in text
    assert "found: 0.weight, 0.bias, 1.weight" in text and "within `with dsx.empty_init():`" in text
    assert "weights='a safetensors file or folder'" in text


def test_meta_asked_for_within_has_no_values() -> None:
    with dsx.empty_init():
        model = nn.Sequential(nn.Linear(3, 4, device="meta"), nn.Linear(4, 3))
        with torch.device("meta"):
            model.append(nn.Linear(3, 2))
    assert "found: 0.weight, 0.bias, 2.weight, 2.bias" in refused(model)


def test_parameters_of_one_memory_are_refused() -> None:
    for empty in (False, True):

        def make() -> nn.Module:
            model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
            model[1].weight.data = model[0].weight.data
            return model

        text = refused(built(make, empty)[0])
        assert "'0.weight' and '1.weight' share memory, but are different objects" in text
        assert "`head.weight = embedding.weight`" in text


def test_prepare_within_the_context_is_refused() -> None:
    with dsx.empty_init():
        assert "dsx.prepare was called within dsx.empty_init()" in refused(nn.Linear(2, 2))


def test_a_source_that_was_changed_is_named() -> None:
    source = torch.rand(300, 300)
    with dsx.empty_init():
        model = Holder(parameter(lambda: torch.empty(300, 300).copy_(source)))
    source.mul_(2)
    assert "a tensor that the model's constructor read was changed before dsx.prepare" in refused(model)


def test_files_read_by_the_constructor(tmp_path: Path) -> None:
    torch.save(nn.Linear(300, 300).state_dict(), tmp_path / "state.pt")
    save_file({"weight": torch.rand(300, 300), "bias": torch.rand(300)}, tmp_path / "state.safetensors")

    def make() -> nn.Module:
        one, two = nn.Linear(300, 300), nn.Linear(300, 300)
        one.load_state_dict(torch.load(tmp_path / "state.pt", mmap=True))
        two.load_state_dict(load_file(tmp_path / "state.safetensors"))
        return nn.Sequential(one, two, Holder(parameter(lambda: torch.load(tmp_path / "state.pt")["bias"] * 2)))

    same(make)


def test_pretrained_models(tmp_path: Path) -> None:
    """`from_pretrained` builds on the meta device by itself, and replaces what it read."""
    transformers = pytest.importorskip("transformers")
    KINDS["gpt2"].make().save_pretrained(tmp_path)

    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return transformers.GPT2LMHeadModel.from_pretrained(tmp_path)

    expected = weights_of(make())
    with dsx.empty_init():
        model = make()
    found = weights_of(dsx.prepare(model))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not any(tensor.is_meta for _, tensor in held(model))


def test_on_meta_runs_a_model_without_memory() -> None:
    outside_tensor = torch.ones(3)
    with OnMeta():
        model = nn.Linear(3, 4, device="cpu")
        model(outside_tensor + torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        assert not outside_tensor.clone().is_meta
    assert model.weight.grad is not None and model.weight.grad.is_meta
    with OnMeta(), pytest.raises(RuntimeError, match="no values into a tensor that has"):
        outside_tensor.copy_(model.bias[:3])
    with OnMeta(), pytest.raises(RuntimeError) as caught:
        model.bias[0].item()
    assert "called on tensors of a model that has no memory yet" in caught.value.__notes__[0]


MANIFEST = """
run = {{ steps = 2, out = "{out}", {run} }}
batch = {{ global = 4 }}
model = {{ factory = "{factory}" }}
data = {{ source = "run_targets:logged", length = 12 }}
"""

FACTORIES = """
from run_targets import Regression

def unreal():
    raise RuntimeError("no kernel for tensors without memory")

def plain():
    return Regression()

def wrong():
    raise ValueError("depth must be positive")
"""


def manifest(factory: str = "factories:plain", out: str = "out", run_keys: str = "empty_init = true") -> str:
    Path("factories.py").write_text(FACTORIES)
    Path("run.toml").write_text(MANIFEST.format(factory=factory, out=out, run=run_keys))
    return "run.toml"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "factories", raising=False)
    return tmp_path


def test_run_builds_without_memory_unless_told_otherwise(folder: Path) -> None:
    for flag in ("true", "false"):
        run(manifest(out=flag, run_keys=f"empty_init = {flag}"))
    one, other = (load_file(folder / flag / "model.safetensors") for flag in ("true", "false"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_run_starts_from_weights(folder: Path) -> None:
    run(manifest(out="first"))
    settings = dsx.Manifest.load(manifest(out="second", run_keys='weights = "first/model.safetensors"'))
    assert settings.run.empty_init
    engine = dsx.prepare(make_model(Target("factories:plain"), torch.device("cpu"), empty=True), settings)
    trained = load_file(folder / "first" / "model.safetensors")
    assert all(torch.equal(weight, trained[name]) for name, weight in engine.weights())


def test_a_factory_that_needs_memory_is_named(folder: Path) -> None:
    with pytest.raises(DsxError) as caught:
        run(manifest("factories:unreal"))
    text = str(caught.value)
    assert "model.factory = 'factories:unreal' failed without memory" in text
    assert "found: no kernel for tensors without memory" in text and "empty_init = false in [run]" in text
    with pytest.raises(ValueError, match="depth must be positive"):
        run(manifest("factories:wrong"))
