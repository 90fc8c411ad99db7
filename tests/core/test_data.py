"""Samples dealt to ranks and micro-batches."""

from __future__ import annotations

from collections import Counter, UserDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dsx.errors import DsxError
from dsx.run.data import Batches, collate, to_device, tokens_of

CPU = torch.device("cpu")


class Numbers:
    """A source whose sample i is the number i."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        assert 0 <= index < self.length
        return torch.tensor(index)


class Stream:
    """An iterable of numbers, without a length, that may be gone through several times."""

    def __init__(self, length: int) -> None:
        self.length, self.passes = length, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        return (torch.tensor(number) for number in range(self.length))


def batches(
    source: Any, micro: int = 1, accumulation: int = 1, rank: int = 0, world: int = 1, seed: int = 7
) -> Batches:
    return Batches(
        source, micro=micro, accumulation=accumulation, rank=rank, world=world, seed=seed, device=torch.device("cpu")
    )


def dealt(
    source: Any, updates: range, micro: int, accumulation: int, world: int, seed: int = 7
) -> list[list[list[int]]]:
    """Samples by update, then by rank, in the order in which the rank sees them."""
    ranks = [batches(source, micro, accumulation, rank, world, seed) for rank in range(world)]
    return [[[int(x) for item in rank.update(number) for x in item.batch] for rank in ranks] for number in updates]


@settings(deadline=None)
@given(
    world=st.integers(1, 4),
    micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
    updates=st.integers(1, 4),
    epochs=st.integers(1, 3),
)
def test_each_epoch_gives_each_sample_once(
    world: int, micro: int, accumulation: int, updates: int, epochs: int
) -> None:
    length = updates * world * micro * accumulation
    found = dealt(Numbers(length), range(updates * epochs), micro, accumulation, world)
    for epoch in range(epochs):
        several = found[epoch * updates : (epoch + 1) * updates]
        assert sorted(x for update in several for rank in update for x in rank) == list(range(length))


@settings(deadline=None)
@given(length=st.integers(1, 40), seed=st.integers(0, 99))
def test_an_epoch_that_ends_within_an_update_still_gives_each_sample_once(length: int, seed: int) -> None:
    found = dealt(Numbers(length), range(length), micro=2, accumulation=1, world=3, seed=seed)
    count = Counter(x for update in found for rank in update for x in rank)
    assert set(count.values()) == {6}


@pytest.mark.parametrize("source", [Numbers(37), Stream(37)])
def test_an_update_has_the_same_samples_at_every_world_size(source: Any) -> None:
    """Global batch 12 in every way; the last epochs end within an update."""
    ways = [(12, 1, 1), (1, 12, 1), (3, 2, 2), (2, 2, 3), (4, 1, 3), (1, 3, 4), (3, 1, 4)]
    sets = [
        [sorted(x for rank in update for x in rank) for update in dealt(source, range(7), micro, accumulation, world)]
        for micro, accumulation, world in ways
    ]
    assert all(found == sets[0] for found in sets)


def test_a_later_start_sees_what_an_uninterrupted_run_sees_case_90() -> None:
    whole = dealt(Numbers(50), range(9), micro=2, accumulation=2, world=2)
    assert dealt(Numbers(50), range(5, 9), micro=2, accumulation=2, world=2) == whole[5:]


def test_seeds_are_honoured_case_92() -> None:
    orders = [dealt(Numbers(50), range(3), micro=4, accumulation=1, world=1, seed=seed) for seed in (1, 2, 1)]
    assert orders[0] != orders[1]
    assert orders[0] == orders[2]


def test_micro_batches_have_their_size() -> None:
    rank = batches(Numbers(100), micro=3, accumulation=4, rank=1, world=2)
    assert rank.samples == 24
    assert [(item.batch.shape, item.weight) for item in rank.update(0)] == [((3,), 1.0)] * 4


def test_a_stream_keeps_its_own_order_and_starts_anew() -> None:
    source = Stream(5)
    found = dealt(source, range(3), micro=2, accumulation=1, world=2)
    assert found == [[[0, 1], [2, 3]], [[4, 0], [1, 2]], [[3, 4], [0, 1]]]


def test_a_stream_resumes_where_it_was() -> None:
    assert dealt(Stream(5), range(2, 3), micro=2, accumulation=1, world=2) == [[[3, 4], [0, 1]]]


def test_a_stream_goes_back_when_asked() -> None:
    rank = batches(Stream(5), micro=2)
    assert [[int(x) for item in rank.update(number) for x in item.batch] for number in (1, 0, 0)] == [
        [2, 3],
        [0, 1],
        [0, 1],
    ]


def test_an_iterator_that_ends_gives_what_it_has_and_then_nothing() -> None:
    """The last, incomplete window: every sample once, by weight, and the same number of micro-batches on each rank."""
    ranks = [batches(iter(map(torch.tensor, range(9))), micro=2, accumulation=2, rank=r, world=2) for r in range(2)]
    found = [[[(item.batch.tolist(), item.weight) for item in rank.update(n)] for n in range(3)] for rank in ranks]
    assert found[0] == [[([0, 1], 1.0), ([4, 5], 1.0)], [([8], 0.5)], []]
    assert found[1] == [[([2, 3], 1.0), ([6, 7], 1.0)], [([8], 0.0)], []]


def test_looking_at_the_first_sample_does_not_use_it_up() -> None:
    rank = batches(iter(map(torch.tensor, range(4))), micro=2)
    assert int(rank.first()) == int(rank.first()) == 0
    assert [item.batch.tolist() for item in rank.update(0)] == [[0, 1]]


class Positioned(Stream):
    """Keeps its position, as torchdata's loaders do; to pass over what was seen is an error."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at, self.loaded = 0, False

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < self.length:
            self.at += 1
            yield torch.tensor(self.at - 1)
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.loaded = state["at"], True


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_stream_that_keeps_its_position_resumes_there(world: int) -> None:
    """At another world size too: between updates the position is the same on every rank."""
    before = batches(Positioned(100), micro=3, rank=1, world=2)
    for number in range(2):
        list(before.update(number))
    source = Positioned(100)
    after = batches(source, micro=6 // world, rank=world - 1, world=world)
    after.resume(2, before.index(2), before.state())
    assert source.loaded
    first = 12 + (world - 1) * (6 // world)
    assert [item.batch.tolist() for item in after.update(2)] == [list(range(first, first + 6 // world))]


def test_a_resumed_run_may_have_another_batch_and_repeats_nothing() -> None:
    one, other = batches(Numbers(50), micro=4), batches(Numbers(50), micro=6)
    seen = [int(x) for number in range(3) for item in one.update(number) for x in item.batch]
    other.resume(3, one.index(3), None)
    seen += [int(x) for number in range(3, 6) for item in other.update(number) for x in item.batch]
    assert len(set(seen)) == len(seen) == 30


@pytest.mark.parametrize(
    ("source", "words"),
    [([], "has no samples"), (Numbers(0), "has no samples"), (3, "the data source is a int")],
)
def test_no_source_says_so(source: Any, words: str) -> None:
    with pytest.raises(DsxError, match=words) as caught:
        batches(source)
    assert caught.value.where == "data.source"


def test_an_empty_stream_says_so() -> None:
    with pytest.raises(DsxError, match="has no samples"):
        list(batches(Stream(0)).update(0))


class Pair(NamedTuple):
    inputs: Tensor
    label: Any


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([torch.tensor([1, 2]), torch.tensor([3, 4])], torch.tensor([[1, 2], [3, 4]])),
        ([1.5, 2.5], torch.tensor([1.5, 2.5], dtype=torch.float64)),
    ],
)
def test_samples_are_stacked(samples: list[Any], expected: Tensor) -> None:
    torch.testing.assert_close(collate(samples, CPU), expected)


def test_mappings_and_tuples_are_stacked_by_field() -> None:
    batch = collate([{"x": torch.ones(2), "y": (1, "a")}, {"x": torch.zeros(2), "y": (2, "b")}], CPU)
    assert list(batch) == ["x", "y"]
    assert batch["x"].tolist() == [[1, 1], [0, 0]]
    numbers, words = batch["y"]
    assert numbers.tolist() == [1, 2]
    assert list(words) == ["a", "b"]


def test_named_tuples_keep_their_names() -> None:
    batch = collate([Pair(torch.ones(2), 1), Pair(torch.zeros(2), 2)], CPU)
    assert isinstance(batch, Pair)
    assert batch.label.tolist() == [1, 2]


def test_a_sample_with_none_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        collate([{"x": None}, {"x": None}], CPU)


def test_every_tensor_moves_and_nothing_else_changes() -> None:
    meta = torch.device("meta")
    moved = to_device({"x": [torch.ones(1), (torch.ones(2), "a")], "n": 3, "none": None}, meta)
    assert moved["x"][0].device == moved["x"][1][0].device == meta
    assert (moved["x"][1][1], moved["n"], moved["none"]) == ("a", 3, None)
    assert isinstance(moved["x"], list)
    assert isinstance(moved["x"][1], tuple)


@pytest.mark.parametrize(
    ("sample", "tokens"),
    [
        (torch.zeros(7), 7),
        (torch.zeros(2, 3), 6),
        ((torch.zeros(5), torch.zeros(9)), 5),
        ({"label": 1, "inputs": torch.zeros(4)}, 4),
        (UserDict(inputs=torch.zeros(4)), 4),
        ("a text", 1),
        (b"bytes", 1),
        (3, 1),
        ([1, 2, 3], 1),
        ((), 1),
    ],
)
def test_tokens_of_a_sample(sample: Any, tokens: int) -> None:
    assert tokens_of(sample) == tokens
