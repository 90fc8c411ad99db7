"""The profile of a machine: what is measured, how it is kept, and when it is refused."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from dsx.cli import call
from dsx.errors import DsxError, RankFailed
from dsx.plan import profile as profiles
from dsx.plan.meter import Sizes, measure_here
from dsx.plan.profile import Exchange, Machine, Profile, load, measure, place, save
from dsx.testing import Ranks

CPU = torch.device("cpu")


def made(ranks: int = 2, **changes: Any) -> Profile:
    """A profile of this machine, with numbers of nobody's."""
    exchange = Exchange(6e9, 3e9, 5e-5, 0.25) if ranks > 1 else None
    made = Profile(
        machine=Machine.this("cpu"),
        kind="cpu",
        ranks=ranks,
        threads=1,
        when="2026-11-29T20:00:00+00:00",
        flops_per_s={"float32": 1e11},
        moved_per_s=1e10,
        updated_per_s=2e10,
        seconds_per_call=4e-6,
        exchange=exchange,
    )
    return evolve(made, **changes)


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def refused(ranks: int = 2) -> str:
    with pytest.raises(DsxError) as caught:
        load("cpu", ranks)
    return str(caught.value)


def test_what_is_kept_comes_back(cache: Path) -> None:
    assert save([made(1), made(2)]) == cache / "dsx" / "profile.json"
    assert load("cpu", 1) == made(1)
    assert load("cpu", 2) == made(2)
    assert [file.name for file in (cache / "dsx").iterdir()] == ["profile.json"]


def test_the_next_higher_number_of_ranks_serves_and_else_the_highest(cache: Path) -> None:
    save([made(4), made(1)])
    assert [load("cpu", ranks).ranks for ranks in (1, 2, 4, 1024)] == [1, 4, 4, 4]


def test_without_a_cache_of_its_own_the_home_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert place() == tmp_path / ".cache" / "dsx" / "profile.json"


@pytest.mark.usefixtures("cache")
def test_a_machine_that_was_not_measured_says_how() -> None:
    assert refused().startswith("this machine was not measured yet")
    assert "run `dsx doctor --profile`" in refused()
    save([made(kind="cuda")])
    assert refused().startswith("this machine was not measured with cpu ranks")


def test_a_profile_of_elsewhere_is_refused(cache: Path) -> None:
    here = Machine.this("cpu")
    others = {
        "CPU": evolve(here, cpu="another"),
        "cores": evolve(here, cores=here.cores + 1),
        "torch": evolve(here, torch="1.0"),
    }
    for what, machine in others.items():
        save([made(machine=machine)])
        text = refused()
        assert text.startswith(f"the profile was measured with another {what}")
        assert str(cache / "dsx" / "profile.json") in text
        assert "run `dsx doctor --profile`" in text


def without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda kept: kept["profiles"][0].pop(key)


def with_value(key: str, value: object) -> Callable[[dict[str, Any]], object]:
    return lambda kept: kept["profiles"][0].update({key: value})


@pytest.mark.parametrize(
    "damage",
    [
        without("moved_per_s"),
        with_value("moved_per_s", 0.0),
        with_value("moved_per_s", math.nan),
        with_value("moved_per_s", math.inf),
        with_value("moved_per_s", None),
        with_value("seconds_per_call", "quick"),
        with_value("ranks", 0),
        with_value("flops_per_s", [1.0]),
        with_value("flops_per_s", {"float32": -1.0}),
        with_value("exchange", {"overlap": 0.5}),
        with_value("more", 1),
        lambda kept: kept.update(profiles=[]),
        lambda kept: kept.clear(),
    ],
)
def test_a_damaged_profile_is_refused(cache: Path, damage: Callable[[dict[str, Any]], object]) -> None:
    file = save([made()])
    kept = json.loads(file.read_text())
    damage(kept)
    file.write_text(json.dumps(kept))
    assert refused().startswith("the profile of this machine is damaged, or of another release of dsx")
    assert "run `dsx doctor --profile`" in refused()


@pytest.mark.parametrize("content", [b"", b'{"profiles": [', b"[]", b"null", b"\xff\xfe"])
def test_a_file_of_something_else_is_refused(cache: Path, content: bytes) -> None:
    file = save([made()])
    file.write_bytes(content)
    assert "run `dsx doctor --profile`" in refused()


def test_a_profile_that_cannot_be_kept_says_where_it_could(cache: Path) -> None:
    (cache / "dsx").write_text("in the way")
    with pytest.raises(DsxError, match="the profile of this machine cannot be written") as caught:
        save([made()])
    assert "set XDG_CACHE_HOME to a folder that can be written to" in str(caught.value)


def test_ranks_measure_together(ranks: Ranks) -> None:
    small = Sizes(((8, 8, 8),), (1, 1, 8, 8), 8, 8, 1 << 10, 1 << 10)
    first, second = ranks.run(measure_here, CPU, 0.01, small, world=2)
    assert evolve(first, when="") == evolve(second, when="")  # they share the means of what they found
    assert (first.ranks, first.threads, first.machine) == (2, 1, Machine.this("cpu"))
    dtypes = ("float32", "bfloat16", "float16", "float64")
    assert set(first.flops_per_s) == {*dtypes, *(f"{dtype} attention" for dtype in dtypes)}
    assert first.exchange is not None


def test_a_launched_rank_measures_and_is_alone(capfd: pytest.CaptureFixture[str]) -> None:
    found = measure(CPU, 1, seconds=0.01)
    assert (found.ranks, found.kind, found.exchange) == (1, "cpu", None)
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiles, "_TARGET", "dsx.plan.meter:no_such_function")
    with pytest.raises(RankFailed, match="rank 0"):
        measure(CPU, 1)


@pytest.mark.usefixtures("cache")
def test_doctor_measures_shows_and_keeps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(profiles, "measure", lambda device, ranks, **_: made(ranks))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert call(["doctor", "--profile", "--nproc", "3"]) == 0
    text = capsys.readouterr().out
    assert "measure again" not in text
    for words in ("1 rank, 1 thread", "3 ranks, 1 thread", "100 GFLOP/s", "20.0 GB/s", "4.0 us", "25%", str(place())):
        assert words in text
    assert [load("cpu", ranks).ranks for ranks in (1, 3)] == [1, 3]


@pytest.mark.usefixtures("cache")
def test_doctor_says_that_the_machine_was_busy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(profiles, "measure", lambda device, ranks, **_: made(ranks))
    monkeypatch.setattr(os, "getloadavg", lambda: (512.0, 0.0, 0.0))
    assert call(["doctor", "--profile"]) == 0
    assert "other programs kept 512.0 of" in capsys.readouterr().out


@pytest.mark.usefixtures("cache")
def test_scripts_get_the_profiles(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(profiles, "measure", lambda device, ranks, **_: made(ranks))
    assert call(["doctor", "--profile", "--nproc", "1", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert (only["ranks"], only["exchange"]) == (1, None)


def test_a_number_of_ranks_without_a_profile_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["doctor", "--nproc", "2"]) == 2
    assert "--nproc says with how many ranks --profile measures" in capsys.readouterr().err
