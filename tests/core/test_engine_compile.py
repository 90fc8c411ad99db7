"""`torch.compile`: of the whole model by the user, and of each unit by `run.compile`. Traced, not generated: fast."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from dsx.errors import DsxError
from dsx.testing.plain import distance, largest, train_plain, weights_of

WITHOUT_BOUNDARIES = ("replicated",)
WITH_BOUNDARIES = ("zero1", "zero2", "zero3")
LAYOUTS = (*WITHOUT_BOUNDARIES, *WITH_BOUNDARIES)
STEPS = 3

traced = partial(torch.compile, backend="aot_eager")


class Own(nn.Linear):
    """Torch's own modules are not traced by themselves."""

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias)


class Stack(nn.Module):
    """A few blocks of one shape, which are traced once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Own(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + block(inputs).tanh()
        out: Tensor = self.head(inputs).square().mean()
        return out


def batch(step: int, micro: int, rank: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randn(4, 6, generator=generator, dtype=torch.float64),)


def manifest(layout: str, **run: Any) -> dict[str, Any]:
    sections: dict[str, Any] = {"run": {"overlap_publish": True, **run}}
    return sections if layout == "replicated" else {**sections, "partition": {"use": [layout]}}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    torch.compiler.reset()


def same_as_plain(engine: dsx.Engine, world: int = 1) -> bool:
    rank = dist.get_rank() if world > 1 else 0
    losses = [engine.train_step([batch(step, 0, rank)]).loss for step in range(STEPS)]
    plain = Stack().double()
    expected = train_plain(plain, batch, steps=STEPS, world=world)
    return largest(losses, expected) < 1e-12 and distance(weights_of(engine), weights_of(plain)) < 1e-9  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", WITHOUT_BOUNDARIES)
@pytest.mark.parametrize("when", ["given", "before", "after"])
def test_a_model_compiled_whole_trains_the_same(layout: str, when: str) -> None:
    model: Any = Stack().double()
    if when == "before":
        model.compile(backend="aot_eager")
    engine = dsx.prepare(traced(model) if when == "given" else model, manifest(layout))
    if when == "after":
        model.compile(backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    assert same_as_plain(engine)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("layout", WITH_BOUNDARIES)
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("given", "the model was compiled whole"),
        ("before", "the model was compiled whole"),
        ("after", "the model was compiled whole"),
        ("a unit", "the module 'blocks.1' was compiled"),
        ("around units", "the module 'blocks' was compiled"),
    ],
)
def test_it_is_refused_where_the_layout_acts_inside(layout: str, case: str, words: str) -> None:
    given = model = cast(Any, Stack().double())
    if case == "given":
        given = torch.compile(model, backend="eager")
    elif case == "before":
        model.compile(backend="eager")
    elif case == "a unit":
        model.blocks[1].compile(backend="eager")
    elif case == "around units":
        model.blocks = torch.compile(model.blocks, backend="eager")
    if case == "after":
        engine = dsx.prepare(given, manifest(layout))
        model.compile(backend="eager")
        with pytest.raises(DsxError) as caught:
            engine.train_step([batch(0, 0, 0)])
    else:
        with pytest.raises(DsxError) as caught:
            dsx.prepare(given, manifest(layout))
    assert str(caught.value).splitlines() == [
        words,
        "  found: the run's layout acts whenever forward enters one of the modules in it, which compiled code would "
        "not call",
        "  remedy: give dsx.prepare the model as it is, and set run.compile = true: it compiles what is inside of them",
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo itself looks at it
@pytest.mark.parametrize("layout", WITH_BOUNDARIES)
def test_modules_compiled_within_a_unit_are_the_user_s_business(layout: str) -> None:
    model: Any = Stack().double()
    model.blocks = nn.ModuleList(nn.Sequential(block) for block in model.blocks)
    for block in model.blocks:
        block[0].compile(backend="aot_eager")
    engine = dsx.prepare(model, manifest(layout))
    torch._dynamo.utils.counters.clear()
    for step in range(STEPS):
        engine.train_step([batch(step, 0, 0)])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    plain = Stack().double()
    train_plain(plain, batch, steps=STEPS)
    found = {re.sub(r"(blocks\.\d)\.0", r"\1", name): weight for name, weight in weights_of(engine).items()}
    assert distance(found, weights_of(plain)) < 1e-9


def train_units(layout: str, world: int) -> tuple[bool, int]:
    compile_ = torch.compile
    torch.compile = traced  # type: ignore[assignment]
    try:
        engine = dsx.prepare(Stack().double(), manifest(layout, compile=True))
        torch._dynamo.utils.counters.clear()
        same = same_as_plain(engine, world)
        return same, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    finally:
        torch.compile = compile_
        torch.compiler.reset()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_units_compiled_by_the_run_train_the_same(ranks, layout: str) -> None:
    for same, graphs in ranks.run(train_units, layout, 2, world=2):
        assert same
        assert 1 <= graphs <= 3
