"""Where a walk cuts shards into pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from attrs import evolve
from torch import Tensor

from dsx.contracts import Flat, Layout, Piece, Rule, Segment, Shard, Store, Walk

SIZES = (40, 8, 100, 33)


def shard(start: int, stop: int, sizes: tuple[int, ...] = SIZES) -> Shard:
    segments, at = [], 0
    for number, size in enumerate(sizes):
        segments.append(Segment(f"p{number}", at, at + size, torch.Size([size]), "all", number))
        at += size
    flat = Flat("f", torch.float32, torch.float32, True, tuple(segments), (), at)
    return Shard(flat, start, stop, (start, stop))


class Cut(Store):
    """Wants pieces of so many elements."""

    def __init__(self, grain: int | None) -> None:
        self._grain = grain

    def names(self, key: str) -> list[str]:
        return ["exp_avg"]

    def grain(self, key: str) -> int | None:
        return self._grain


class Held(Layout):
    def __init__(self, *shards: Shard) -> None:
        self.shards = shards


def cuts(rule: Rule, grain: int | None, *shards: Shard) -> list[tuple[int, int, bool]]:
    parts = Walk(rule, Held(*shards), Cut(grain)).parts
    return [(part.piece.start, part.piece.stop, part.last) for part in parts]


def rule(**choices: object) -> Rule:
    made = Rule()
    for name, value in choices.items():
        setattr(made, name, value)
    return made


def test_near_states_are_walked_at_once() -> None:
    assert cuts(rule(), None, shard(0, 181), shard(7, 7)) == [(0, 181, True), (7, 7, True)]


def test_far_ones_in_pieces_from_where_the_shard_begins() -> None:
    assert cuts(rule(), 64, shard(20, 181)) == [(20, 84, False), (84, 148, False), (148, 181, True)]
    assert cuts(rule(), 200, shard(20, 181)) == [(20, 181, True)]


def test_a_block_is_not_split() -> None:
    assert cuts(rule(block=24), 64, shard(0, 181)) == [
        (0, 48, False),
        (48, 96, False),
        (96, 144, False),
        (144, 181, True),
    ]
    assert cuts(rule(block=128), 64, shard(0, 181))[0] == (0, 128, False)


@pytest.mark.parametrize(
    ("grain", "stops"), [(1000, [181]), (50, [48, 148, 181]), (1, [40, 48, 148, 181]), (100, [48, 148, 181])]
)
def test_parameters_are_not_split_for_a_rule_that_takes_them_whole(grain: int, stops: list[int]) -> None:
    assert [stop for _, stop, _ in cuts(rule(whole=True), grain, shard(0, 181))] == stops


def test_a_rule_that_communicates_gets_whole_shards() -> None:
    assert cuts(rule(communicates=True), 16, shard(0, 181)) == [(0, 181, True)]


def test_one_parameter_is_one_piece() -> None:
    assert cuts(rule(whole=True), 16, shard(0, 90, (90,))) == [(0, 90, True)]


class Recording(Cut):
    """Says when states are fetched and given back."""

    def __init__(self, grain: int | None, said: list[str]) -> None:
        super().__init__(grain)
        self._said = said

    def fetch(
        self, key: str, names: Sequence[str], written: Sequence[str] = (), span: object = None
    ) -> dict[str, Tensor]:
        self._said.append(f"fetch {key}")
        return {name: torch.zeros(8) for name in (*names, "param")}

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        self._said.append(f"put {key}")

    def prefetch(self, key: str, names: Sequence[str], span: object = None) -> None:
        pass


class Local(Held):
    def target(self, shard: Shard) -> None:
        return None

    def gradient_of(self, shard: Shard, span: object = None) -> Tensor:
        return torch.zeros(8)


def walked(grain: int | None, keys: str, steps: int) -> list[str]:
    """What happens, in order, in a sweep whose calls pause `steps` times."""
    said: list[str] = []
    shards = [evolve(shard(0, 8, (8,)), flat=evolve(shard(0, 8, (8,)).flat, key=key)) for key in keys]

    def call(piece: Piece, states: object) -> Iterator[None]:
        for step in range(steps):
            said.append(f"{piece.shard.key}{step}")
            yield

    walk = Walk(rule(communicates=True), Local(*shards), Recording(grain, said))
    walk.sweep(call, lambda done: said.append(f"done {done.key}"))
    return [text for text in said if not text.startswith("fetch")]


def test_a_rule_that_waits_for_others_goes_on_with_the_next_shards() -> None:
    """All ranks wait in the order of issue: a0 b0 a1 c0 b1, and so on; shards end in their order."""
    begin = ["a0", "b0", "a1", "c0", "b1", "put a", "done a", "d0", "c1", "put b", "done b"]
    assert walked(None, "abcd", 2) == [*begin, "d1", "put c", "done c", "put d", "done d"]


def test_states_that_are_far_are_those_of_one_shard_at_a_time() -> None:
    assert walked(4, "ab", 2) == ["a0", "a1", "put a", "done a", "b0", "b1", "put b", "done b"]


def test_a_rule_need_not_pause() -> None:
    assert walked(None, "ab", 0) == ["put a", "done a", "put b", "done b"]


class Near(Recording):
    """Says what is brought near."""

    def prefetch(self, key: str, names: Sequence[str], span: object = None) -> None:
        self._said.append(f"near {key}{span or ''}")


def test_what_follows_is_brought_near_and_no_more_of_it_is_asked_for_than_that() -> None:
    said: list[str] = []
    shards = {key: evolve(shard(0, 8, (8,)), flat=evolve(shard(0, 8, (8,)).flat, key=key)) for key in "abcdef"}

    def following() -> Iterator[Shard]:
        for key in "cefd":
            said.append(f"asked for {key}")
            yield shards[key]

    walk = Walk(rule(), Local(*shards.values()), Near(4, said))
    walk.sweep(
        lambda piece, states: said.append(f"{piece.shard.key}{piece.start}"),
        shards=[shards["a"]],
        following=following(),
    )
    assert [text for text in said if not text.startswith(("fetch", "put"))] == [
        "near a(4, 8)",
        "asked for c",
        "near c(0, 4)",
        "a0",
        "near c(4, 8)",
        "a4",
    ]
    said.clear()
    walk.prepare(following())
    assert said == ["asked for c", "near c(0, 4)", "near c(4, 8)", "asked for e", "near e(0, 4)", "near e(4, 8)"]
