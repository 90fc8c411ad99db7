"""`dsx report`: what it reads, what it refuses, and the page it makes."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsx.cli import call
from dsx.contracts import Evaluation, Report, RunInfo
from dsx.errors import DsxError
from dsx_observe.jsonl import Writer
from dsx_observe.report.curves import POINTS, points, smooth
from dsx_observe.report.page import page
from dsx_observe.report.read import Run, read_runs
from dsx_observe.report.summary import COLUMNS, duration, row


def write(
    folder: Path, steps: range, name: str = "try", loss: Callable[[int], float] = lambda step: 10.0 / step
) -> None:
    """A run, or the part of one that a process made."""
    writer = Writer(None, 2)
    writer.start(RunInfo(name, 20, 1_500_000, 2, 4, 16, folder))
    for step in steps:
        writer.report(Report(step=step, stepped=True, loss=loss(step), norm=0.5, lr={"all": 0.1 * step}))
        if step % 5 == 0:
            writer.evaluated(Evaluation(step, loss(step) + 1, 8, 0.0))
    writer.finish()


def read(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


def data(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found[1], parse_constant=pytest.fail)
    return content


def test_what_was_reported_is_what_is_read(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    run = read(tmp_path)
    assert (run.label, run.world, run.parameters, run.planned) == ("try", 2, 1_500_000, 20)
    assert run.step == list(range(1, 11))
    assert run.loss == [10 / step for step in run.step]
    assert run.lr == {"all": [0.1 * step for step in run.step]}
    assert {step: loss for step, (loss, _) in run.evaluated.items()} == {5: 3.0, 10: 2.0}
    assert run.seconds == sorted(run.seconds)


def test_after_a_resume_later_lines_win(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11), loss=lambda step: 1.0)
    write(tmp_path, range(7, 9), loss=lambda step: 2.0)
    run = read(tmp_path)
    assert run.step == [1, 2, 3, 4, 5, 6, 7, 8]
    assert run.loss == [1.0] * 6 + [2.0] * 2
    assert sorted(run.evaluated) == [5], "the evaluation at 10 was made in vain"
    write(tmp_path, range(1, 3))
    assert read(tmp_path).step == [1, 2], "a run that began anew"


def test_skipped_updates_and_what_is_not_finite(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 1)
    writer.report(Report(step=0, stepped=False, skipped=True, skips=1, loss=math.nan, norm=math.inf))
    writer.report(Report(step=1, stepped=True, skips=1, loss=2.0, norm=1.0, lr={"a": 0.5}))
    writer.report(Report(step=1, stepped=False, skipped=True, skips=2, loss=3.0, norm=math.nan))
    writer.finish()
    run = read(tmp_path)
    assert run.skips == [1, 1, 2]
    assert math.isnan(run.loss[0])
    assert math.isnan(run.lr["a"][0])
    assert run.lr["a"][1:] == [0.5, 0.5], "a skipped update keeps the rate"
    (norm,) = points(run)["charts"]["norm"]
    assert norm["line"] == norm["low"] == norm["high"] == [None, 1.0, None]
    assert data(page([run]))["runs"][0]["charts"]["norm"] == [norm]


def test_a_last_line_cut_by_a_kill_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    assert read(tmp_path).step == [1, 2]


@pytest.mark.parametrize("line", ["{", "[]", '{"kind":"update","step":2}', '{"step":1}', '"text"', ""])
def test_a_broken_line_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", range(1, 4))
    file = tmp_path / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    with pytest.raises(DsxError, match=r"^run/metrics\.jsonl:3 is not a line of metrics"):
        read(tmp_path / "run")


def test_kinds_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"checkpoint","step":3}\n')
    assert len(read(tmp_path).step) == 3


def test_folders_without_metrics_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DsxError) as caught:
        read_runs([Path("empty")])
    assert str(caught.value).splitlines()[0] == "empty holds no metrics of a run"
    assert 'remedy: name "jsonl" in [observe] use' in str(caught.value)
    with pytest.raises(DsxError, match=r"^there is no nowhere"):
        read_runs([Path("nowhere")])
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(DsxError, match=r"^empty/metrics\.jsonl has no update yet"):
        read_runs([Path("empty")])


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, label in (("a", "same"), ("b", "same"), ("c", "other")):
        write(tmp_path / name, range(1, 3), label)
    places = [Path("a"), Path("b"), Path("c"), Path("a", ".")]
    assert [run.label for run in read_runs(places)] == ["a", "b", "other"]
    assert read_runs([Path("c", "metrics.jsonl")])[0].label == "other"


def test_a_long_run_becomes_few_points_and_no_spike_is_lost(tmp_path: Path) -> None:
    count = 100_000
    run = Run("long", tmp_path, step=list(range(1, count + 1)), seconds=[float(n) for n in range(count)])
    run.loss = [1.0 + (step == 31_415) * 9 for step in run.step]
    run.norm = run.rate = run.loss
    run.skips = [0] * count
    started = time.perf_counter()
    text = page([run])
    assert time.perf_counter() - started < 20
    assert len(text) < 400_000
    (found,) = data(text)["runs"]
    (loss,) = found["charts"]["loss"]
    assert len(found["step"]) == len(loss["line"]) == len(loss["high"]) == POINTS
    assert (found["step"][-1], max(loss["high"]), min(loss["low"])) == (count, 10.0, 1.0)


def test_smoothing_lags_nowhere_and_begins_at_the_first_value() -> None:
    slope = [float(value) for value in range(1000)]
    smoothed = smooth(slope)
    assert smoothed[:990] == pytest.approx(slope[:990])
    assert smooth([3.0, math.nan, 5.0])[::2] == [3.0, 5.0]
    noisy = [1.0 + (-1) ** step for step in range(1000)]
    assert max(abs(value - 1) for value in smooth(noisy)[20:]) < 0.2


def test_the_page_asks_for_nothing_and_trusts_no_name(tmp_path: Path) -> None:
    name = "</script><b>&amp;{{data}}"
    write(tmp_path, range(1, 11), name)
    text = page(read_runs([tmp_path]))
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}, "an address that is no name of a namespace"
    assert not re.search(r"\bsrc=|@import|url\((?!#)", text)
    assert "<b>" not in text
    assert data(text)["runs"][0]["label"] == name
    assert "&lt;/script&gt;&lt;b&gt;&amp;amp;{{data}}" in text


def test_the_table_says_what_a_run_came_to(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11), loss=lambda step: abs(step - 5) + 1.0)
    found = dict(zip(COLUMNS, row(read(tmp_path)), strict=True))
    assert found["updates"] == "10 of 20"
    assert found["loss"] == "6.0000"
    assert found["held-out"] == "7.0000 (best 2.0000 at 5)"
    assert (found["skipped"], found["ranks"], found["parameters"]) == ("0", "2", "1.50 M")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.2 s"), (45, "45 s"), (725, "12 min 5 s"), (12_000, "3 h 20 min"), (187_200, "2 d 4 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_command_writes_a_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", range(1, 11), "one")
    write(tmp_path / "b", range(1, 21), "two")
    assert call(["report", "a", "b", "-o", "pages/both.html"]) == 0
    assert capsys.readouterr().out == "wrote pages/both.html: one, two\n"
    content = data((tmp_path / "pages" / "both.html").read_text("utf-8"))
    assert [run["step"][-1] for run in content["runs"]] == [10, 20]
    titles = [chart["title"] for chart in content["charts"]]
    assert titles == ["Loss", "Gradient norm", "Learning rate", "Tokens per second", "Memory", "Skipped updates"]


def test_the_command_shows_errors_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["report", "nowhere"]) == 1
    assert capsys.readouterr().err.startswith("error: there is no nowhere\n")
    write(tmp_path / "a", range(1, 3))
    assert call(["report", "a", "-o", "a"]) == 1
    assert "a cannot be written" in capsys.readouterr().err


def test_png_without_matplotlib_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dsx_observe.report import picture

    write(tmp_path, range(1, 3))
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    assert call(["report", str(tmp_path), "--png", "-o", str(tmp_path / "page.html")]) == 1
    assert "--png needs the package matplotlib, which is not installed" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the package matplotlib")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_png(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(tmp_path / name, range(1, 21))
    output = tmp_path / "page.html"
    assert call(["report", str(tmp_path / "a"), str(tmp_path / "b"), "--png", "-o", str(output)]) == 0
    content = output.with_suffix(".png").read_bytes()
    assert content.startswith(b"\x89PNG")
    assert (int.from_bytes(content[16:20], "big"), int.from_bytes(content[20:24], "big")) == (1800, 1350)
