"""What the engine refuses, in which words; and the shapes of outputs that it takes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor, nn

import dsx
from dsx.batch import loss_of
from dsx.boundaries import install, tensors
from dsx.contracts import Flat, Unit
from dsx.errors import DsxError


class Model(nn.Module):
    """A block with an odd output, and a loss in whatever `wrap` makes of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        result: Tensor = self.head(inputs).square().mean()
        return result


INPUTS = torch.linspace(-1, 1, 12).view(3, 4)


@pytest.fixture
def engine() -> Iterator[dsx.Engine]:
    engine = dsx.prepare(Model(), {"batch": {"accumulation": 2}})
    yield engine
    engine.close()


@attrs.frozen
class Output:
    loss: Tensor | None
    words: str = "a"


class Named(NamedTuple):
    loss: Tensor


LOSS = torch.ones((), requires_grad=True)


@pytest.mark.parametrize(
    "output",
    [
        LOSS,
        LOSS.reshape(1),
        LOSS.reshape(1, 1),
        {"loss": LOSS, "logits": None},
        UserDict(loss=LOSS),
        Output(LOSS),
        Named(LOSS),
        SimpleNamespace(loss=LOSS),
    ],
)
def test_a_loss_is_found(output: Any) -> None:
    loss = loss_of(output)
    assert loss.shape == ()
    assert loss.item() == 1


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ({"logits": torch.ones(3)}, "dict"),
        ({"loss": None}, "dict"),
        ({"loss": 0.5}, "dict"),
        (Output(None), "Output"),
        ((LOSS, LOSS), "tuple"),
        (None, "NoneType"),
        (0.5, "float"),
    ],
)
def test_an_output_without_a_loss_is_refused(engine: dsx.Engine, output: Any, kind: str) -> None:
    with pytest.raises(DsxError) as caught:
        engine.backward(output)
    assert str(caught.value).splitlines() == [
        f"the model's output has no loss: {kind}",
        "  expected: a tensor, or a mapping or object with `loss`",
    ]


@pytest.mark.parametrize("shape", [(3,), (2, 2), (0,)])
def test_a_loss_of_several_numbers_is_refused(engine: dsx.Engine, shape: tuple[int, ...]) -> None:
    with pytest.raises(DsxError, match=rf"the loss has the shape \[{', '.join(map(str, shape))}\]") as caught:
        engine.backward({"loss": torch.ones(shape, requires_grad=True)})
    assert caught.value.expected == "one number: take its mean"


def test_a_loss_without_a_graph_is_refused(engine: dsx.Engine) -> None:
    with torch.no_grad():
        loss = engine(INPUTS)
    with pytest.raises(DsxError, match="does not depend on any trainable parameter") as caught:
        engine.backward(loss)
    assert caught.value.remedy == "compute it from the model's output, outside torch.no_grad()"


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_weighs_nothing_sensible_is_refused(engine: dsx.Engine, weight: float) -> None:
    with pytest.raises(DsxError, match=f"the weight of a micro-batch is {weight}") as caught:
        engine.backward(engine(INPUTS), weight=weight)
    assert caught.value.expected == "a finite number of 0 or more"


def test_two_weights_in_one_micro_batch_are_refused(engine: dsx.Engine) -> None:
    engine.backward(engine(INPUTS), weight=3)
    with pytest.raises(DsxError, match="two backwards of one micro-batch have different weights") as caught:
        engine.backward(engine(INPUTS), weight=5)
    assert caught.value.found == "3 and 5"
    assert "call step() between them" in str(caught.value)


def test_another_micro_batch_may_have_another_weight(engine: dsx.Engine) -> None:
    for weight in (3, 5):
        engine.backward(engine(INPUTS), weight=weight)
        report = engine.step()
    assert report.stepped
    assert report.loss == pytest.approx(Model()(INPUTS).item(), rel=1e-6)


def test_a_step_without_a_backward_is_refused(engine: dsx.Engine) -> None:
    before = {name: weight.clone() for name, weight in engine.weights()}
    assert not engine.step().stepped
    with pytest.raises(DsxError, match=r"step\(\) without a backward on any rank") as caught:
        engine.step()
    assert caught.value.remedy == "call engine.backward(loss) before it, with a weight above 0"
    assert engine.steps == 0
    assert all(torch.equal(weight, before[name]) for name, weight in engine.weights())


def test_training_goes_on_after_a_refusal(engine: dsx.Engine) -> None:
    with pytest.raises(DsxError):
        engine.backward(torch.ones(3, requires_grad=True))
    with pytest.raises(DsxError):
        engine.step(close=True)
    report = engine.train_step([INPUTS, INPUTS])
    assert report.stepped
    assert report.loss == pytest.approx(Model()(INPUTS).item(), rel=1e-6)


def test_train_step_without_a_batch_is_refused(engine: dsx.Engine) -> None:
    with pytest.raises(DsxError, match="train_step was given no batch"):
        engine.train_step([])


@pytest.mark.parametrize(
    ("name", "remedy"), [("blocks.0.wieght", "did you mean 'blocks.0.weight'?"), ("nothing like it", None)]
)
def test_an_unknown_parameter_is_refused_with_a_near_name(engine: dsx.Engine, name: str, remedy: str | None) -> None:
    with pytest.raises(DsxError, match=f"the model has no parameter '{name}'") as caught, engine.gathered([name]):
        pass
    assert caught.value.remedy == remedy


@pytest.mark.parametrize("batch", [INPUTS, (INPUTS,), [INPUTS], {"inputs": INPUTS}, UserDict(inputs=INPUTS)])
def test_a_batch_is_given_as_its_kind_says(engine: dsx.Engine, batch: Any) -> None:
    assert engine.train_step([batch, batch]).loss == pytest.approx(Model()(INPUTS).item(), rel=1e-6)


@attrs.define
class Slotted:
    x: Any


@dataclass(slots=True)
class Plain:
    x: Tensor
    y: int = 1


class Bounded:
    """A layout that only notes which boundaries it is told of."""

    boundaries = frozenset({"enter", "leave", "back", "exit"})

    def __init__(self, model: nn.Module) -> None:
        flats: tuple[Flat, ...] = ()
        blocks = enumerate(model.blocks, 1)  # type: ignore[arg-type]
        self.units = [Unit(number, f"blocks.{number - 1}", (block,), flats) for number, block in blocks]
        self.told: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda unit: self.told.append((name, unit.index))


class Odd(nn.Module):
    """A block whose output is a mapping of a tensor and things that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, inputs: Any) -> dict[str, Any]:
        return {"x": self.inner(inputs["x"]), "none": None, "n": 3, "words": "a", "object": Slotted("b")}


def test_odd_outputs_pass_boundaries_unchanged_case_31() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([Odd(), Odd()])
    layout = Bounded(model)
    install(layout, [], [], compile_units=False)  # type: ignore[arg-type]
    first = model.blocks[0]({"x": INPUTS.clone().requires_grad_(), "mask": None})
    second = model.blocks[1](first)
    assert {name: value for name, value in second.items() if name != "x"} == {
        "none": None,
        "n": 3,
        "words": "a",
        "object": Slotted("b"),
    }
    assert layout.told == [("enter", 1), ("leave", 1), ("enter", 2), ("leave", 2)]
    layout.told.clear()
    second["x"].sum().backward()
    assert sorted(layout.told) == [("back", 1), ("back", 2), ("exit", 1), ("exit", 2)]
    assert [boundary for boundary, unit in layout.told if unit == 1] == ["back", "exit"]
    assert [boundary for boundary, unit in layout.told if unit == 2] == ["back", "exit"]


class Fork(nn.Module):
    """A block with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(inputs), self.right(inputs)


def test_an_output_that_gets_no_gradient_is_ignored_case_32() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([Fork()])
    layout = Bounded(model)
    install(layout, [], [], compile_units=False)  # type: ignore[arg-type]
    inputs = INPUTS.clone().requires_grad_()
    used, _unused = model.blocks[0](inputs)
    layout.told.clear()
    used.sum().backward()
    assert layout.told == [("back", 1), ("exit", 1)]
    assert inputs.grad is not None


def test_without_gradients_only_forward_boundaries_are_told() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([Fork()])
    layout = Bounded(model)
    install(layout, [], [], compile_units=False)  # type: ignore[arg-type]
    with torch.no_grad():
        model.blocks[0](INPUTS)
    assert layout.told == [("enter", 1), ("leave", 1)]


def test_tensors_are_found_wherever_they_are() -> None:
    a, b, c, d, e = (torch.full((), float(number)) for number in range(5))
    nested = {"a": [a, (b, None)], "b": Output(c), "c": UserDict(d=Slotted([d])), "d": Plain(e), "e": "words", "f": 1}
    assert [tensor.item() for tensor in tensors(nested)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("value", [None, 3, "words", b"bytes", object(), Output(None), torch.float32, {"a": {1, 2}}])
def test_what_is_no_tensor_is_left_alone(value: Any) -> None:
    assert list(tensors(value)) == []
