"""The order of samples: permutations that nobody stores, the same for every world size."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.run.order import shuffled

lengths = st.integers(1, 300)
seeds = st.integers(0, 2**70)


@settings(deadline=None)
@given(length=lengths, seed=seeds, epoch=st.integers(0, 2**40))
def test_each_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    order = [shuffled(epoch * length + place, length, seed) for place in range(length)]
    assert sorted(order) == list(range(length))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1023, 1024, 1025])
def test_lengths_around_powers_of_two(length: int) -> None:
    assert {shuffled(place, length, seed=3) for place in range(length)} == set(range(length))


def test_epochs_differ() -> None:
    orders = {tuple(shuffled(epoch * 50 + place, 50, seed=1) for place in range(50)) for epoch in range(20)}
    assert len(orders) == 20


@settings(deadline=None)
@given(first=seeds, second=seeds)
def test_seeds_differ_case_92(first: int, second: int) -> None:
    orders = [[shuffled(place, 100, seed) for place in range(100)] for seed in (first, second)]
    assert (orders[0] == orders[1]) == (first % 2**64 == second % 2**64)


def test_no_order_is_the_plain_one() -> None:
    assert all([shuffled(place, 64, seed) for place in range(64)] != list(range(64)) for seed in range(100))


def test_places_are_even() -> None:
    """Over many seeds each sample comes first about equally often: 4 standard deviations around the mean."""
    count = [0] * 10
    for seed in range(4000):
        count[shuffled(0, 10, seed)] += 1
    assert all(abs(times - 400) < 4 * 19 for times in count)


def test_the_order_is_pinned_case_90() -> None:
    """A run resumed by a later version goes on in the same order: these numbers may never change."""
    assert [shuffled(place, 10, seed=7) for place in range(20)] == PINNED


PINNED = [4, 5, 8, 9, 3, 0, 7, 2, 6, 1, 4, 0, 5, 8, 1, 3, 9, 6, 2, 7]


@settings(deadline=None)
@given(index=st.integers(0, 10**15), seed=seeds)
def test_any_index_of_a_huge_source_is_reached_at_once(index: int, seed: int) -> None:
    assert 0 <= shuffled(index, 10**12, seed) < 10**12


def test_a_huge_source_repeats_nothing() -> None:
    assert len({shuffled(index, 10**12, seed=5) for index in range(2000)}) == 2000
