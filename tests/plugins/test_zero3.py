"""`zero3`: what is live when, the order of gathers, weights used where they are not, options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import dsx
from dsx.testing import CountingPlugin, distance, refuses, train_plain, weights_of
from dsx.testing.models import Tangle, tokens
from dsx_zero.merge import merge, supersequence

USE: dict[str, Any] = {"use": ["zero3"]}
numbers = st.lists(st.integers(0, 4), max_size=9)


def holds(long: Sequence[int], short: Sequence[int]) -> bool:
    following = iter(long)
    return all(item in following for item in short)


def shortest(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of a shortest supersequence: both, less a longest common subsequence, found by trying all."""
    subsequences = (choice for size in range(len(one), -1, -1) for choice in itertools.combinations(one, size))
    return len(one) + len(other) - len(next(choice for choice in subsequences if holds(other, choice)))


@settings(deadline=None)
@given(numbers, numbers)
def test_two_sequences_merge_into_a_shortest_that_holds_both(one: list[int], other: list[int]) -> None:
    merged = supersequence(one, other)
    assert holds(merged, one)
    assert holds(merged, other)
    assert len(merged) == shortest(one, other)


@given(st.lists(numbers, max_size=5))
def test_any_number_of_sequences_merge_and_equal_ones_cost_nothing(sequences: list[list[int]]) -> None:
    merged = merge(sequences)
    assert all(holds(merged, sequence) for sequence in sequences)
    assert merge([merged, *sequences, merged]) == merged


def gathers(engine: dsx.Engine) -> int:
    return engine.program.transport.calls["gather"]  # type: ignore[attr-defined, no-any-return]


def prepare(model: nn.Module, options: dict[str, Any] | None = None, **sections: Any) -> dsx.Engine:
    manifest = {"partition": {**USE, **({"zero3": options} if options else {})}, "communicate": {"use": ["counting"]}}
    return dsx.prepare(model, {**manifest, **sections}, plugins={"counting": CountingPlugin()})


class Stack(nn.Module):
    """Blocks that are called in the order that a batch says."""

    def __init__(self, layers: int = 4, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.embedding = nn.Embedding(5, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.head = nn.Linear(width, 5)

    def forward(self, words: Tensor, order: Sequence[int]) -> Tensor:
        hidden = self.embedding(words)
        for number in order:
            hidden = hidden + torch.tanh(self.blocks[number](hidden))
        return functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


def words(step: int, rank: int) -> Tensor:
    return torch.randint(0, 5, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def ordered(orders: list[list[list[int]]], options: dict[str, Any]) -> tuple[dict[str, Tensor], list[int], int]:
    """Train with the block order of [step][rank]; weights, gathers of each step, bytes live at the end."""
    rank = dist.get_rank()
    engine = prepare(Stack().double(), options)
    counts = []
    for step, order in enumerate(orders):
        before = gathers(engine)
        engine.train_step([(words(step, rank), order[rank])])
        counts.append(gathers(engine) - before)
    return weights_of(engine), counts, engine.program.layout.memory.bytes()  # type: ignore[attr-defined]


STRAIGHT = [0, 1, 2, 3]
ORDERS = {
    "straight": [[STRAIGHT] * 3] * 4,
    "another order": [[STRAIGHT] * 3, [STRAIGHT] * 3, [[3, 1, 0, 2]] * 3, [[3, 1, 0, 2]] * 3],
    "a block on one rank": [[STRAIGHT, [0, 1, 3], [0, 1, 3]]] * 4,
    "each rank its own": [[[0, 1, 2, 3], [3, 2, 1, 0], [1, 3]]] * 4,
    "a late block": [[[0, 1, 3]] * 3] * 3 + [[[0, 1, 2, 3], [0, 1, 3], [0, 1, 3]]] * 2,
    "repeated": [[[0, 0, 0, 1, 1, 0]] * 3] * 3,
    "the last block on one rank": [[STRAIGHT, [0], [0, 1]]] * 3,
    "every step another": [[[step % 4, rank, 3 - rank] for rank in range(3)] for step in range(5)],
}


@pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"prefetch": 3}, {"whole": ["root", "blocks.1"]}], ids=str)
@pytest.mark.parametrize("case", ORDERS)
def test_ranks_may_use_blocks_in_any_order(ranks, case: str, options: dict[str, Any]) -> None:
    """Case 29 for whole units: no order, branch or repetition makes ranks wait for one another."""
    orders = ORDERS[case]
    found = ranks.run(ordered, orders, options, world=3)
    model = Stack().double()
    train_plain(model, lambda step, _, rank: (words(step, rank), orders[step][rank]), steps=len(orders), world=3)
    for weights, _, _ in found:
        assert distance(weights, weights_of(model)) < 1e-9


@pytest.mark.parametrize(
    ("case", "options", "flats"),
    [
        ("straight", {}, (5, 3)),  # the root and the last block stay from forward to backward
        ("straight", {"prefetch": 0}, (5, 3)),
        ("straight", {"whole": ["blocks.*"]}, (5, 0)),  # all four after each update, and the root
        ("straight", {"merge_bytes": 10_000}, (2, 0)),  # the blocks are one unit, the last
        ("straight", {"units": ["blocks.[01]"]}, (3, 1)),
        ("repeated", {}, (4, 3)),  # runs of one block are one gather: 0, 1, 0 and back 1, 0
    ],
    ids=str,
)
def test_gathers_of_a_step_are_what_the_sequence_says(ranks, case: str, options: dict[str, Any], flats) -> None:
    for _, counts, live in ranks.run(ordered, ORDERS[case], options, world=3):
        if case != "repeated":
            assert counts[-1] == sum(flats)
        assert counts[-1] <= sum(flats)
        assert live == 0 or "whole" in options


def peak(options: dict[str, Any], recompute: bool) -> tuple[int, list[int]]:
    """The most bytes of whole parameters alive at once in a step, and the bytes of each unit."""
    model = Stack(layers=8)
    if recompute:
        for block in model.blocks:
            inner = block.forward
            block.forward = lambda x, inner=inner: checkpoint(inner, x, use_reentrant=False)
    engine = prepare(model, options)
    layout: Any = engine.program.layout
    most = 0

    def look(*_: Any) -> None:
        nonlocal most
        most = max(most, layout.memory.bytes())

    for block in model.blocks:
        block.register_forward_pre_hook(look)
        block.weight.register_hook(look)
    for step in range(3):
        most = 0
        engine.train_step([(words(step, dist.get_rank()), range(8))])
    return most, [sum(flat.size * 4 for flat in unit.flats) for unit in layout.units]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_no_more_than_the_root_and_those_ahead_are_whole_at_once(ranks, prefetch: int, recompute: bool) -> None:
    for most, sizes in ranks.run(peak, {"prefetch": prefetch}, recompute, world=2):
        assert most <= sizes[0] + (2 + prefetch) * sizes[1], "the root, the last block, the one in use, those ahead"
        assert most >= sizes[0] + sizes[1]


class Adapted(nn.Module):
    """A linear layer whose weight is merged with an adapter in every forward, before its input is used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(width, width) / 3, requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(2, width)), nn.Parameter(torch.randn(width, 2))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(functional.linear(hidden, self.base + self.up @ self.down))


class Lora(nn.Module):
    """Frozen bases with adapters; the input of the first block needs no gradient, or is made a leaf that does."""

    def __init__(self, leaf: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.embedding = nn.Embedding(5, 8)
        self.embedding.requires_grad_(False)
        self.blocks = nn.ModuleList(Adapted(8) for _ in range(3))
        self.head = nn.Linear(8, 5)
        self.leaf, self.reentrant = leaf, reentrant

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs)
        if self.leaf:
            hidden = hidden.detach().requires_grad_()
        for block in self.blocks:
            call = (
                block if self.reentrant is None else lambda x, b=block: checkpoint(b, x, use_reentrant=self.reentrant)
            )
            hidden = hidden + call(hidden)
        return functional.cross_entropy(self.head(hidden[:, :-1]).flatten(0, 1), inputs[:, 1:].flatten())


def adapted(leaf: bool, reentrant: bool | None) -> dict[str, Tensor]:
    engine = prepare(Lora(leaf, reentrant).double())
    for step in range(3):
        engine.train_step([(words(step, dist.get_rank()),)])
    return weights_of(engine)


@pytest.mark.parametrize(("leaf", "reentrant"), [(False, None), (True, None), (True, True), (True, False)])
def test_adapters_on_a_frozen_base_train(ranks, leaf: bool, reentrant: bool | None) -> None:
    """A leaf's gradient is complete before that of weights merged ahead of its use: the unit must stay."""
    model = Lora(leaf).double()
    train_plain(model, lambda step, _, rank: (words(step, rank),), steps=3, world=2)
    for weights in ranks.run(adapted, leaf, reentrant, world=2):
        assert distance(weights, weights_of(model)) < 1e-9


def test_a_weight_used_where_it_is_not_is_named() -> None:
    engine = prepare(Tangle())
    model = engine.model
    weight = model.blocks[0].up.weight
    assert weight.shape == (52, 17)
    assert weight.grad is None
    assert "blocks.0.up.weight" in repr(weight)
    for use in (
        lambda: weight + 1,
        lambda: weight.sum().item(),
        lambda: weight.data,
        lambda: torch.equal(weight, weight),
        lambda: functional.linear(torch.zeros(1, 17), weight),
        lambda: model.blocks[0].up(torch.zeros(1, 17)),
        lambda: model.state_dict(),
        lambda: torch.nn.utils.parameters_to_vector([weight]),
    ):
        with torch.no_grad(), pytest.raises(dsx.DsxError, match=r"was used outside its module's forward") as caught:
            use()
        assert "engine.gathered(" in str(caught.value)
    with engine.gathered("blocks.0.up.weight"):
        assert torch.equal(weight, Tangle().blocks[0].up.weight)
        assert type(weight) is nn.Parameter


def test_the_memory_of_an_aborted_forward_is_given_back() -> None:
    engine = prepare(Tangle())
    with pytest.raises(IndexError):
        engine(torch.tensor([[99]]), torch.tensor([[0]]))
    engine.train_step([tokens(0, 0, 0)])
    assert engine.program.layout.memory.bytes() == 0  # type: ignore[attr-defined]
    twin = Tangle()
    train_plain(twin, tokens, steps=1)
    assert distance(weights_of(engine), weights_of(twin)) < 1e-6


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    for table, words_ in (
        ({"units": ["block.*"]}, "no module of the model matches 'block.*'"),
        ({"whole": ["blokcs.0"]}, "no unit of the model matches 'blokcs.0'"),
    ):
        refuses({"partition": {**USE, "zero3": table}}, words_)


def penalty(model: nn.Module) -> Tensor:
    """Of a block's weights, made before the forward: its backward comes last."""
    block = model.blocks[1]
    return (block.weight.square().sum() * torch.sigmoid(block.bias).sum()) / 100


def penalised(early: bool) -> tuple[dict[str, Tensor], int]:
    engine = prepare(Stack().double())
    for step in range(3):
        if early:
            with engine.gathered("blocks.1.weight"):
                extra = penalty(engine.model)
        loss = engine(words(step, dist.get_rank()), STRAIGHT)
        if not early:
            with engine.gathered(["blocks.1.bias", "blocks.1.weight"]):
                extra = penalty(engine.model)
        engine.backward(loss + extra)
        engine.step()
    return weights_of(engine), engine.program.layout.memory.bytes()  # type: ignore[attr-defined]


class Penalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.stack(inputs, STRAIGHT) + penalty(self.stack)


@pytest.mark.parametrize("early", [True, False])
def test_weights_used_within_gathered_stay_for_their_backward(ranks, early: bool) -> None:
    """Case 72."""
    model = Penalised().double()
    train_plain(model, lambda step, _, rank: (words(step, rank),), steps=3, world=2)
    for weights, live in ranks.run(penalised, early, world=2):
        assert distance(weights, weights_of(model.stack)) < 1e-9
        assert live == 0
