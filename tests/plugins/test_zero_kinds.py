"""Parameters that are tied, frozen, of several dtypes or of no floating dtype, under every layout."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

import dsx
from dsx.run.weights import save_weights
from dsx.testing import CountingPlugin, weights_of
from dsx.testing.models import Tangle, tokens
from parity import LAYOUTS, WIDTH, Net, Outcome, check, plain, prepare, sample, train


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


class Adapted(nn.Module):
    """A frozen base in bf16, and an adapter of low rank in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.empty(2, WIDTH)), nn.Parameter(torch.empty(WIDTH, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.base.weight.float() + self.up @ self.down, self.base.bias.float())


class Quantized(nn.Module):
    """A frozen weight as integers, an order of columns, and a trained bias."""

    def __init__(self, dtype: torch.dtype = torch.uint8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        codes = torch.randint(0, 100, (WIDTH, WIDTH), generator=generator).to(dtype)
        self.codes = nn.Parameter(codes, requires_grad=False)
        self.order = nn.Parameter(torch.randperm(WIDTH, generator=generator), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden[:, self.order], (self.codes.to(hidden.dtype) - 50) / 40, self.bias)


class Kinds(Net):
    """Trained in fp32 and fp64, frozen in fp32, bf16 and integers; in the root and in blocks."""

    def __init__(self) -> None:
        super().__init__(Adapted(), Quantized(), Adapted(), nn.Linear(WIDTH, WIDTH))
        self.stem.float().requires_grad_(False)
        self.blocks.float()
        for number in (0, 2):
            self.blocks[number].base.bfloat16()
        self.blocks[3].requires_grad_(False)

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.stem(inputs.float())
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return functional.cross_entropy(self.head(hidden.double()), classes)


FROZEN = [name for name, parameter in Kinds().named_parameters() if not parameter.requires_grad]


def test_every_kind_of_parameter_trains_or_stays_in_its_own_dtype(ranks, layout: str) -> None:
    """Cases 41, 43 and 46; 1e-6, since some of it is fp32."""
    found = ranks.run(train, layout, Kinds, world=3)
    check(found, plain(Kinds, world=3), tolerance=1e-6)
    start = weights_of(Kinds())
    assert {str(start[name].dtype) for name in FROZEN} == {
        "torch.float32",
        "torch.bfloat16",
        "torch.uint8",
        "torch.int64",
    }
    for name in FROZEN:
        assert torch.equal(found[0].weights[name], start[name]), name


class Coded(Net):
    """Weights in a frozen dtype, in the root and in a block, those of the root in fewer elements than ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(Quantized(dtype), nn.Linear(WIDTH, WIDTH))
        self.shift = nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(inputs + self.shift.sum(dtype=inputs.dtype), classes)


DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float8_e4m3fn")


def coded(dtype: str) -> nn.Module:
    return Coded(getattr(torch, dtype))


def portable(outcome: Outcome) -> Outcome:
    """Tensors of dtypes that do not travel between processes, as their bytes."""
    for name, tensor in outcome.weights.items():
        if tensor.dtype.itemsize == 1 and tensor.is_floating_point():
            outcome.weights[name] = tensor.view(torch.uint8)
    return outcome


def train_coded(layout: str) -> dict[str, Outcome | str]:
    """With every dtype, an outcome or a traceback."""
    found: dict[str, Outcome | str] = {}
    for dtype in DTYPES:
        try:
            found[dtype] = portable(train(layout, partial(coded, dtype), steps=2))
        except Exception:
            found[dtype] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def codes(ranks) -> Callable[[str], list[dict[str, Any]]]:
    return cache(lambda layout: ranks.run(train_coded, layout, world=3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frozen_parameter_may_be_of_any_dtype(codes: Any, layout: str, dtype: str) -> None:
    """Case 46."""
    found = [rank[dtype] for rank in codes(layout)]
    assert isinstance(found[0], Outcome), found[0]
    check(found, portable(plain(partial(coded, dtype), world=3, steps=2)))


def memory(layout: str) -> tuple[dict[str, int], int, int]:
    """Bytes of states on this rank; bytes of trained parameters; calls that reduce gradients in one update."""
    plugins, counting = {"counting": CountingPlugin()}, {"communicate": {"use": ["counting"]}}
    partition = {} if layout == "replicated" else {"partition": {"use": [layout]}}
    engine = dsx.prepare(Kinds(), {**partition, **counting}, plugins=plugins)
    calls: Any = engine.program.transport.calls  # type: ignore[attr-defined]
    engine.train_step([sample(0, 0, dist.get_rank())])
    before = calls["reduce"]
    engine.train_step([sample(1, 0, dist.get_rank())])
    trained = [flat for unit in engine.program.layout.units for flat in unit.flats if flat.trainable]
    size = sum(flat.size * flat.dtype.itemsize for flat in trained)
    return dict(engine.program.store.bytes()), size, calls["reduce"] - before - len(trained)


def test_frozen_parameters_take_no_memory_for_training_and_no_traffic(ranks, layout: str) -> None:
    """Case 42; case 43: one reduction for each unit and dtype that is trained."""
    for held, trained, more_calls in ranks.run(memory, layout, world=3):
        share = 1 if layout == "replicated" else 3
        assert held["exp_avg"] == held["exp_avg_sq"] == trained // share
        assert held.get("grad", trained // share) == trained // share
        assert "master" not in held
        assert more_calls == 0 or (more_calls < 0 and layout == "replicated")


def save(layout: str, folder: str) -> Outcome:
    """Train, save a checkpoint, and export the weights."""
    engine = prepare(Kinds(), layout)
    for step in range(2):
        engine.train_step([sample(step, 0, dist.get_rank())])
    engine.save(f"{folder}/checkpoint")
    save_weights(engine, Path(folder, "weights.safetensors"))
    return Outcome([], [], weights_of(engine))


def load(layout: str, folder: str) -> Outcome:
    """Load it into a model of other values."""
    model = Kinds()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    engine = prepare(model, layout)
    engine.load(f"{folder}/checkpoint")
    return Outcome([], [], weights_of(engine))


def test_frozen_parameters_are_saved_loaded_and_exported_as_they_are(ranks, tmp_path: Path, layout: str) -> None:
    """Case 41: value and dtype, on another number of ranks, under another layout; case 46: bytes too."""
    expected = ranks.run(save, layout, str(tmp_path), world=3)[0].weights
    start, exported = weights_of(Kinds()), read(tmp_path / "weights.safetensors")[0]
    others = LAYOUTS[LAYOUTS.index(layout) - 1], layout
    loaded = [ranks.run(load, other, str(tmp_path), world=2)[0].weights for other in others]
    for weights in (exported, *loaded):
        assert weights.keys() == start.keys()
        for name, tensor in weights.items():
            assert (tensor.dtype, tensor.shape) == (start[name].dtype, start[name].shape), name
            assert torch.equal(tensor, start[name] if name in FROZEN else expected[name]), name


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors of an exported file, and the other names of tied ones."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["tied"])  # noqa: SIM118


def export(layout: str, path: str) -> tuple[list[str], bool, bool]:
    """Names of the weights; whether the tie outlived training; whether both names give the same when gathered."""
    model = Tangle().double()
    engine = prepare(model, layout)
    for step in range(3):
        engine.train_step([tokens(step, 0, dist.get_rank())])
    save_weights(engine, Path(path))
    with engine.gathered("head.weight"):
        same = torch.equal(model.head.weight, model.embedding.weight)
    return [name for name, _ in engine.weights()], model.head.weight is model.embedding.weight, same


@pytest.mark.parametrize("world", [1, 3])
def test_tied_weights_are_one_and_load_back_under_both_names(ranks, tmp_path: Path, layout: str, world: int) -> None:
    """Cases 37 and 38: an export has the shared storage once, and says which names share it."""
    path = tmp_path / "weights.safetensors"
    for names, tied, same in ranks.run(export, layout, str(path), world=world):
        assert sorted(names) == sorted(name for name, _ in Tangle().named_parameters())
        assert tied
        assert same
    tensors, tied = read(path)
    assert tied == {"head.weight": "embedding.weight"}
    assert "head.weight" not in tensors
    fresh = Tangle(seed=5).double()
    fresh.load_state_dict({**tensors, **{name: tensors[first] for name, first in tied.items()}})
    expected = plain(tangle, tangle_walk, world=world, steps=3)
    check([Outcome(expected.losses, expected.norms, weights_of(fresh))], expected)


def tangle() -> nn.Module:
    return Tangle().double()


def tangle_walk(model: nn.Module, call: Any, step: int, micro: int, rank: int) -> Any:
    yield call(*tokens(step, micro, rank))
