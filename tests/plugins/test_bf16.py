"""bf16 against the recipe written by hand: a bfloat16 copy of the model, fp32 masters, torch's fused AdamW on those."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dsx
from dsx.testing.models import Tangle, tokens
from dsx.testing.plain import distance, largest, weights_of
from dsx_precision.half import Half
from dsx_precision.half import cast as cast_to

STEPS = 6
Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]
"""Losses, live parameters, authoritative weights."""
MANIFEST: dict[str, Any] = {"precision": {"use": ["bf16"]}}
cast = partial(cast_to, dtype=torch.bfloat16)


def data(step: int, micro: int, rank: int) -> tuple[Any, ...]:
    return (*tokens(step, micro, rank), step % 2 == 1)


def train(rank: int, accumulation: int = 1) -> Trained:
    """One rank's reported losses, live parameters and masters."""
    model = Tangle()
    engine = dsx.prepare(model, MANIFEST | {"batch": {"accumulation": accumulation}})
    losses = []
    for step in range(STEPS):
        for micro in range(accumulation):
            engine.backward(engine(*data(step, micro, rank)))
            report = engine.step()
        assert report.loss is not None
        losses.append(report.loss)
    masters = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.close()
    return losses, weights_of(model), masters


def recipe(world: int = 1, accumulation: int = 1) -> Trained:
    """The same by hand; gradients add up in fp32, and a mean over ranks is rounded to bfloat16, as it travels."""
    model = Tangle()
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    model.bfloat16()
    live = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(masters.values(), fused=True)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world):
                loss = model(*data(step, micro, rank))
                (loss / accumulation).backward()
                total += loss.item() / (accumulation * world)
                add_gradients(masters, live, world)
        if world > 1:
            for master in masters.values():
                master.grad = None if master.grad is None else master.grad.bfloat16().float()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, master in masters.items():
                live[name].copy_(master)
        losses.append(total)
    frozen = {name: parameter.detach() for name, parameter in model.named_parameters() if not parameter.requires_grad}
    return losses, weights_of(model), masters | frozen


def add_gradients(masters: dict[str, Tensor], live: dict[str, nn.Parameter], world: int) -> None:
    for name, parameter in live.items():
        if parameter.grad is not None:
            gradient = parameter.grad.float() / world
            master = masters[name]
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None


def assert_same_bits(found: Trained, expected: Trained) -> None:
    assert found[0] == expected[0]
    for tensors, wanted in zip(found[1:], expected[1:], strict=True):
        assert tensors.keys() == wanted.keys()
        assert not [name for name, tensor in wanted.items() if not torch.equal(tensors[name], tensor)]


def test_one_rank_is_the_recipe_bit_for_bit() -> None:
    losses, live, masters = train(0)
    assert_same_bits((losses, live, masters), recipe())
    assert {tensor.dtype for tensor in live.values()} == {torch.bfloat16}
    assert {tensor.dtype for name, tensor in masters.items() if not name.startswith("frozen")} == {torch.float32}


def test_micro_batches_add_up_in_fp32() -> None:
    found, expected = train(0, accumulation=2), recipe(accumulation=2)
    assert largest(found[0], expected[0]) < 1e-6
    assert distance(found[2], expected[2]) < 1e-6


def on_rank() -> Trained:
    return train(torch.distributed.get_rank())


def test_two_ranks_are_the_recipe_bit_for_bit(ranks: Any) -> None:
    """The mean over ranks adds up in fp32 and is rounded once."""
    expected = recipe(world=2)
    for losses, live, masters in ranks.run(on_rank, world=2):
        assert_same_bits((losses, live, masters), expected)


def test_masters_are_made_from_the_exact_weights() -> None:
    """Made from rounded ones, they would be off by up to 1/256 of a weight from the start."""
    model = nn.Linear(3, 5)
    exact = weights_of(model)
    engine = dsx.prepare(model, MANIFEST)
    assert model.weight.dtype == torch.bfloat16
    for name, tensor in engine.weights():
        assert torch.equal(tensor, exact[name])
        assert not torch.equal(tensor, exact[name].bfloat16().float())


@pytest.mark.parametrize(
    ("dtype", "live"),
    [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16)],
)
def test_masters_of_other_models_are_fp32_too(dtype: torch.dtype, live: torch.dtype) -> None:
    model = nn.Linear(3, 5).to(dtype)
    engine = dsx.prepare(model, MANIFEST)
    assert model.weight.dtype == live
    assert {tensor.dtype for _, tensor in engine.weights()} == {torch.float32}
    assert set(engine.program.store.bytes()) == {"master", "exp_avg", "exp_avg_sq"}


def test_small_updates_are_not_lost() -> None:
    """In bfloat16 alone, 1 - 0.001 is 1: without masters nothing would be learnt."""
    model = nn.Linear(4, 4, bias=False)
    nn.init.ones_(model.weight)
    engine = dsx.prepare(model, MANIFEST)
    for _ in range(20):
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    assert model.weight.max() < 0.99


class Norms(nn.Module):
    """An image model as they are built: batch norms after convolutions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.norm(self.first(images)).relu().mean((2, 3))), labels)


def test_batch_norms_keep_their_dtype_and_train() -> None:
    """With bfloat16 parameters beside fp32 statistics, torch refuses to run them."""
    model = Norms()
    engine = dsx.prepare(model, MANIFEST)
    images, labels = torch.randn(8, 3, 6, 6), torch.arange(8) % 2
    losses = []
    for _ in range(8):
        engine.backward(engine(images, labels=labels))
        losses.append(engine.step().loss or 0.0)
    assert model.norm.weight.dtype == model.norm.running_mean.dtype == torch.float32  # type: ignore[union-attr]
    assert model.first.weight.dtype == model.head.weight.dtype == torch.bfloat16
    assert losses[-1] < losses[0]


def test_names_are_the_models_own_when_it_is_compiled() -> None:
    model = Norms()
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    dsx.prepare(compiled, MANIFEST)
    assert model.norm.weight.dtype == torch.float32
    assert model.head.weight.dtype == torch.bfloat16


class Tables(nn.Module):
    """Buffers of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("saved", torch.tensor([1.001, 2.0]))
        self.register_buffer("computed", torch.tensor([1.001, 2.0]), persistent=False)
        self.register_buffer("ids", torch.arange(2))
        self.register_buffer("nothing", None)


@pytest.mark.parametrize(
    ("which", "cast_ones"), [("persistent", {"saved"}), ("all", {"saved", "computed"}), ("none", set())]
)
def test_buffers_are_cast_as_asked(which: str, cast_ones: set[str]) -> None:
    """Not the statistics of norms, and nothing that is no floating number."""
    model = Tables()
    buffers = dict(model.named_buffers())
    dsx.prepare(model, {"precision": {"use": ["bf16"], "bf16": {"buffers": which}}})
    assert {name for name, buffer in model.named_buffers() if buffer.dtype == torch.bfloat16} == cast_ones
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert model.norm.running_var.dtype == torch.float32  # type: ignore[union-attr]


class Pair(NamedTuple):
    first: Any
    second: Any


def test_floating_inputs_are_cast_wherever_they_are() -> None:
    number, integer, flag = torch.ones(2), torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    double, word = torch.ones(1, dtype=torch.float64), "word"
    given = (Pair(number, integer), [double, {"deep": number, "flag": flag}], None, word, 1.5)
    pair, (cast_double, mapping), *rest = cast(given)
    assert isinstance(pair, Pair)
    assert [t.dtype for t in (pair.first, cast_double, mapping["deep"])] == [torch.bfloat16] * 3
    assert pair.second is integer
    assert mapping["flag"] is flag
    assert rest == [None, word, 1.5]
    assert given[1][1]["deep"] is number


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, lambda items: defaultdict(int, items)])
def test_mappings_keep_their_type_and_the_callers_stay_as_they_are(kind: Any) -> None:
    given = kind({"x": torch.ones(2), "n": 3})
    before = given["x"]
    made = cast(given)
    assert type(made) is type(given)
    assert made is not given
    assert made["x"].dtype == torch.bfloat16
    assert made["n"] == 3
    assert given["x"] is before


def test_what_holds_no_floating_tensor_is_passed_on_itself() -> None:
    given = {"ids": [torch.ones(2, dtype=torch.int64)], "pair": Pair(1, "two")}
    assert cast(given) is given


def test_the_root_sees_bfloat16_inputs() -> None:
    class Look(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            return args, kwargs

    args, kwargs = Half(Look(), torch.bfloat16).call(
        Look(), (torch.ones(1), 2), {"mask": torch.ones(1), "ids": torch.ones(1).long()}
    )
    assert args[0].dtype == kwargs["mask"].dtype == torch.bfloat16
    assert kwargs["ids"].dtype == torch.int64
    assert args[1] == 2
