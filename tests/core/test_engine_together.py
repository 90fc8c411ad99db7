"""What ranks enter together: `gathered` and `uneven`, under every layout."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import dsx
from dsx.errors import DsxError, RankMismatch
from dsx.testing.models import Tangle, tokens
from dsx.testing.plain import distance, train_plain, weights_of

LAYOUTS = ("replicated", "zero1", "zero2", "zero3")


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def prepare(model: nn.Module, layout: str, **sections: Any) -> dsx.Engine:
    partition = {} if layout == "replicated" else {"partition": {"use": [layout]}}
    return dsx.prepare(model, {**partition, **sections})


class Fused(Tangle):
    """Its loss reads the head's weight by itself, as fused losses do, and a weight of a block.

    whole  what it reads weights in
    """

    whole: Callable[[list[str]], AbstractContextManager[None]]

    def forward(self, inputs: Tensor, targets: Tensor, side: bool = False) -> Tensor:
        hidden = self.embedding(inputs) + self.rows + self.frozen(self.offset)
        for block in self.blocks:
            hidden = block(hidden, side)
        with self.whole(["head.weight"]), self.whole(["embedding.weight", "blocks.0.gain", "blocks.0.norm.weight"]):
            size = self.blocks[0].norm.weight.square().mean() * self.blocks[0].gain
            return functional.cross_entropy((hidden @ self.head.weight.T).flatten(0, 1), targets.flatten()) * size


def train_fused(layout: str) -> dict[str, Tensor]:
    """Gathers within forwards, where windows are open, and between."""
    rank, model = dist.get_rank(), Fused().double()
    engine = prepare(model, layout, batch={"accumulation": 2}, run={"overlap_publish": True})
    model.whole = engine.gathered
    for step in range(3):
        for micro in range(2):
            loss = engine(*tokens(step, micro, rank))
            with engine.gathered(model.head):
                assert model.head.weight.norm() > 0
            engine.backward(loss)
            with engine.gathered(model.blocks):
                assert model.blocks[1].up.weight.norm() > 0
            engine.step()
    return {name: tensor.clone() for name, tensor in engine.weights()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_weights_are_gathered_in_the_middle_of_a_step(ranks, layout: str, world: int) -> None:
    plain = Fused().double()
    plain.whole = lambda names: nullcontext()
    train_plain(plain, tokens, steps=3, world=world, accumulation=2)
    for weights in ranks.run(train_fused, layout, world=world):
        assert distance(weights, weights_of(plain)) < 1e-9


def gather_alone(layout: str, first: bool) -> tuple[list[int], str, float, float]:
    """One rank gathers too early, or another one never; then all do, and train on."""
    rank, model = dist.get_rank(), Tangle()
    engine = prepare(model, layout)
    words, missing, before = "", [], time.monotonic()
    if (rank == 0) == first:
        try:
            with engine.gathered(["rows", "head.weight", "blocks.0.up.weight", "blocks.1.up.weight"], timeout_s=0.5):
                pass
        except RankMismatch as error:
            missing, words = list(error.ranks), str(error)
    waited = time.monotonic() - before
    dist.barrier()
    with engine.gathered("rows"):
        pass
    report = engine.train_step([tokens(0, 0, rank)])
    assert report.loss is not None
    return missing, words, waited, report.loss


@pytest.mark.parametrize("layout", ["replicated", "zero3"])
@pytest.mark.parametrize(("first", "missing"), [(True, [1, 2]), (False, [0])])
def test_who_gathers_alone_is_told_who_is_missing(ranks, layout: str, first: bool, missing: list[int]) -> None:
    found = ranks.run(gather_alone, layout, first, world=3)
    for rank, (absent, words, waited, loss) in enumerate(found):
        assert loss == found[0][3]
        if (rank == 0) == first:
            assert absent == missing
            assert words.splitlines() == [
                "engine.gathered('rows', 'embedding.weight', 'blocks.0.up.weight', ... 4 names) was not entered by "
                f"rank {', '.join(map(str, missing))} within 0.5 s",
                "  expected: all 3 ranks call it",
                "  remedy: call it on every rank, not on the first one only",
            ]
            assert 0.4 < waited < 30


def gather_otherwise(case: str) -> None:
    rank, model = dist.get_rank(), Tangle()
    engine = prepare(model, "zero1")
    with engine.gathered("rows", timeout_s=50):
        pass
    if case == "names":
        with engine.gathered("never" if rank == 2 else "rows", timeout_s=50):
            pass
    elif case == "calls":
        with engine.uneven(timeout_s=50) if rank == 1 else engine.gathered("rows", timeout_s=50):
            pass
    else:
        names = [f"blocks.{layer}.gain" for layer in range(3)]
        with engine.gathered([*names, "never" if rank == 1 else "rows"], timeout_s=50):
            pass


@pytest.mark.parametrize(
    ("case", "words", "odd"),
    [
        ("names", "engine.gathered('rows') on rank 0, engine.gathered('never') on rank 2", (2,)),
        ("calls", "engine.gathered('rows') on rank 0, engine.uneven() on rank 1", (1,)),
        ("more", "different arguments", (1,)),
    ],
)
def test_ranks_that_call_different_things_are_told_at_once(ranks, case: str, words: str, odd: tuple[int, ...]) -> None:
    for error in ranks.errors(gather_otherwise, case, world=3):
        assert isinstance(error, RankMismatch)
        assert str(error).startswith("the ranks call different things: ")
        assert words in str(error)
        assert error.ranks == odd


def keys_of_calls(calls: int) -> int:
    engine = prepare(Tangle(), "replicated")
    for _ in range(calls):
        with engine.gathered("rows"):
            pass
    dist.barrier()
    keys: int = dist.distributed_c10d._get_default_store().num_keys()
    dist.barrier()
    return keys


def test_calls_leave_nothing_behind(ranks) -> None:
    few, many = (max(ranks.run(keys_of_calls, calls, world=2)) for calls in (3, 30))
    assert many <= few


def test_edits_are_refused_in_the_middle_of_a_window(layout: str) -> None:
    model = Fused().double()
    engine = prepare(model, layout, batch={"accumulation": 2})
    model.whole = engine.gathered
    engine.backward(engine(*tokens(0, 0, 0)))
    for made in (0, 1):
        with pytest.raises(DsxError) as caught, engine.gathered("rows", modify=True):
            pass
        assert str(caught.value).splitlines() == [
            "engine.gathered('rows', modify=True) was called within a window of micro-batches",
            f"  found: {made} of 2 micro-batches made",
            "  remedy: call it after a step() whose report says `stepped` or `skipped`, or close the window first",
        ]
        engine.step()
    model.whole = lambda names: engine.gathered(names, modify=True)
    with pytest.raises(DsxError, match="within a window of micro-batches") as caught:
        engine(*tokens(0, 0, 0))
    assert caught.value.found == "a forward under way"


def test_a_module_that_is_not_the_model_s_is_refused() -> None:
    engine = prepare(Tangle(), "replicated")
    with (
        pytest.raises(DsxError, match="the parameter 'weight' of the Linear is not the model's"),
        engine.gathered(nn.Linear(2, 2)),
    ):
        pass


class Walker(Tangle):
    """`generate`: as many forwards as it takes."""

    def step(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs) + self.rows + self.frozen(self.offset)
        for block in self.blocks:
            hidden = block(hidden)
        out: Tensor = self.head(hidden)
        return out

    def forward(self, inputs: Tensor, targets: Tensor | None = None, side: bool = False) -> Tensor:
        return self.step(inputs) if targets is None else super().forward(inputs, targets, side)


def generate(model: Callable[[Tensor], Tensor], length: int, start: int) -> list[int]:
    words = torch.tensor([[start]])
    with torch.no_grad():
        for _ in range(length):
            words = torch.cat([words, model(words)[:, -1:].argmax(-1)], 1)
    found: list[int] = words[0].tolist()
    return found


def generate_uneven(layout: str) -> tuple[list[list[int]], dict[str, Tensor]]:
    """Rank r makes 5 r forwards, rank 0 none; and gathers as often. Then all train on."""
    rank, model = dist.get_rank(), Walker().double()
    engine = prepare(model, layout, run={"overlap_publish": True})
    found = []
    for step in range(3):
        engine.train_step([tokens(step, 0, rank)])
        with engine.uneven():
            found.append(generate(engine, 5 * rank, rank))
            for number in range(rank):
                with engine.gathered(f"blocks.{number}.gain"):
                    assert model.blocks[number].gain.item() > 0
    return found, {name: tensor.clone() for name, tensor in engine.weights()}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_may_generate_different_lengths(ranks, layout: str, world: int) -> None:
    plain = Walker().double()
    expected: list[list[list[int]]] = [[] for _ in range(world)]
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(3):
        for rank in range(world):
            (plain(*tokens(step, 0, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        for rank in range(world):
            expected[rank].append(generate(plain, 5 * rank, rank))
    for rank, (words, weights) in enumerate(ranks.run(generate_uneven, layout, world=world)):
        assert words == expected[rank]
        assert distance(weights, weights_of(plain)) < 1e-9


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("engine.backward()", lambda engine: engine.backward(torch.ones((), requires_grad=True))),
        ("engine.step()", lambda engine: engine.step()),
        ("engine.weights()", lambda engine: dict(engine.weights())),
        ("save", lambda engine: engine.save("nowhere")),
        ("engine.uneven()", lambda engine: engine.uneven().__enter__()),
        ("engine.gathered('rows', modify=True)", lambda engine: engine.gathered("rows", True).__enter__()),
    ],
)
def test_what_all_ranks_do_together_is_refused_where_they_are_uneven(
    what: str, call: Callable[[dsx.Engine], object]
) -> None:
    engine = prepare(Tangle(), "replicated")
    with engine.uneven(), pytest.raises(DsxError) as caught:
        call(engine)
    assert str(caught.value).splitlines() == [
        f"{what} was called within engine.uneven()",
        "  expected: forwards only: the ranks need not be at the same place",
        "  remedy: leave the context first",
    ]
    assert engine.train_step([tokens(0, 0, 0)]).stepped


def uneven_alone() -> list[int]:
    engine = prepare(Tangle(), "zero2")
    if dist.get_rank() == 1:
        with pytest.raises(RankMismatch, match=r"engine.uneven\(\) was not entered by rank 0") as caught:
            engine.uneven(timeout_s=0.3).__enter__()
        return list(caught.value.ranks)
    return []


def test_who_is_uneven_alone_is_told_who_is_missing(ranks) -> None:
    assert ranks.run(uneven_alone, world=2) == [[], [0]]
