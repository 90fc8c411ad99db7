"""global = micro x accumulation x world size."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsx.errors import ManifestError
from dsx.manifest import Batch, Manifest

small = st.integers(1, 40)
maybe = st.none() | small


def batch(world: int, **keys: int | None) -> Batch:
    return Manifest.of({"batch": {key: value for key, value in keys.items() if value}}).resolve_batch(world)


@pytest.mark.parametrize(
    ("keys", "world", "expected"),
    [
        ({"global": 32, "micro": 4}, 2, Batch(32, 4, 4)),
        ({"global": 32, "accumulation": 4}, 2, Batch(32, 4, 4)),
        ({"micro": 4, "accumulation": 4}, 2, Batch(32, 4, 4)),
        ({"global": 32, "micro": 4, "accumulation": 4}, 2, Batch(32, 4, 4)),
        ({"micro": 4}, 3, Batch(12, 4, 1)),
        ({"global": 12}, 3, Batch(12, 4, 1)),
        ({"accumulation": 5}, 3, Batch(None, None, 5)),
        ({}, 3, Batch(None, None, 1)),
    ],
)
def test_what_is_given_determines_the_rest(keys: dict[str, int], world: int, expected: Batch) -> None:
    assert batch(world, **keys) == expected


def test_case_15_a_batch_for_ten_ranks_on_two_names_all_three_values_and_the_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[batch]\nmicro = 20\naccumulation = 10\nglobal = 2000\n")
    with pytest.raises(ManifestError) as caught:
        Manifest.load(path).resolve_batch(2)
    (problem,) = caught.value.problems
    assert problem.what == "global 2000, micro 20 and accumulation 10 do not fit 2 ranks: 20 x 10 x 2 = 400"
    assert problem.expected is not None
    assert problem.expected.endswith("global = 400 or micro = 100 or accumulation = 50")
    assert (problem.key, problem.file, problem.line) == ("batch.global", path, 4)
    assert Manifest.load(path).resolve_batch(10) == Batch(2000, 20, 10)


@pytest.mark.parametrize(
    ("keys", "world", "words"),
    [
        (
            {"global": 10, "micro": 4},
            2,
            ["global 10", "micro 4", "accumulation 1.25 (derived)", "2 ranks", "global = 8 or global = 16"],
        ),
        ({"global": 24, "micro": 5}, 2, ["accumulation 2.4 (derived)", "global = 20 or global = 30 or micro = 4"]),
        ({"global": 4, "micro": 4}, 8, ["accumulation 0.125 (derived)", "8 ranks", "as with global = 32"]),
        ({"global": 7}, 2, ["micro 3.5 (derived)", "accumulation 1 (the default)", "global = 6 or global = 8"]),
        ({"global": 12, "accumulation": 5}, 1, ["micro 2.4 (derived)", "accumulation 5", "1 rank;"]),
    ],
)
def test_case_15_what_does_not_come_out_even_is_refused_with_values_that_do(
    keys: dict[str, int], world: int, words: list[str]
) -> None:
    with pytest.raises(ManifestError) as caught:
        batch(world, **keys)
    for word in words:
        assert word in str(caught.value)


def test_a_conflict_from_the_command_line_is_placed_there() -> None:
    manifest = Manifest.of({"batch": {"micro": 4}}, ["batch.global=10"])
    with pytest.raises(ManifestError, match=r"--set: batch\.global: global 10, micro 4"):
        manifest.resolve_batch(2)


@given(maybe, maybe, maybe, st.integers(1, 9))
def test_a_batch_is_even_or_refused_and_every_proposal_holds(
    global_: int | None, micro: int | None, accumulation: int | None, world: int
) -> None:
    keys = {"global": global_, "micro": micro, "accumulation": accumulation}
    try:
        got = batch(world, **keys)
    except ManifestError as error:
        (problem,) = error.problems
        assert problem.expected is not None
        proposals = problem.expected.split("as with ")[1].split(" or ")
        for name, value in (proposal.split(" = ") for proposal in proposals):
            batch(world, **{**keys, name: int(value)})
        return
    assert got.accumulation == (accumulation or got.accumulation)
    assert got.micro == (micro or got.micro)
    if got.micro is not None:
        assert got.global_ == got.micro * got.accumulation * world
