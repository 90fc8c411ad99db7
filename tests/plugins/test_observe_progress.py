"""`progress`: plain lines for logs, and a bar on a real pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from dsx.contracts import Evaluation, Observer, Report, RunInfo
from dsx.testing import check_plugin
from dsx_observe.measure import Stopwatch
from dsx_observe.progress import Bar, Lines, Pace


def info(steps: int = 10, name: str = "try") -> RunInfo:
    return RunInfo(name, steps, 1_234_567, 2, 4, 8)


def updates(steps: Sequence[int]) -> Iterator[Report]:
    for step in steps:
        yield Report(step=step, stepped=False)  # within a window
        yield Report(step=step, stepped=True, loss=2.5, norm=0.75)


def skip(step: int, skips: int) -> Report:
    return Report(step=step, stepped=False, skipped=True, skips=skips, loss=1.0, norm=float("inf"))


def lines(observer_every: int | None, steps: int, reports: Sequence[Report]) -> list[str]:
    out = io.StringIO()
    observer = Lines(observer_every, out)
    observer.start(info(steps))
    for report in reports:
        observer.report(report)
    observer.finish()
    return out.getvalue().splitlines()


def test_conforms(ranks) -> None:
    check_plugin("progress", {"every": 1}, ranks=ranks)


def test_lines_come_twenty_times_a_run_and_at_its_end() -> None:
    first, *rest = lines(None, 101, list(updates(range(1, 102))))
    assert first == "try: 1.23 M parameters, 101 steps of 4 samples, 2 ranks"
    assert len(rest) == 21
    assert re.fullmatch(r"step 5/101  loss 2\.5000  norm 0\.7500  [\d,]+ tokens/s  0:00:00 left", rest[0])
    assert rest[-1].startswith("step 101/101  ")


def test_lines_come_as_often_as_asked() -> None:
    assert len(lines(4, 10, list(updates(range(1, 11))))) == 1 + 3


def test_evaluations_have_lines() -> None:
    out = io.StringIO()
    observer = Lines(None, out)
    observer.start(info())
    observer.evaluated(Evaluation(0, 3.21, 64, 0.5))
    assert out.getvalue().splitlines()[1] == "step 0: held-out loss 3.2100 (64 samples)"


def test_skipped_updates_have_lines_ever_more_rarely() -> None:
    reports = [*updates([1]), *(skip(1, count) for count in range(1, 8)), *updates([2])]
    reports[-1] = Report(step=2, stepped=True, skips=7, loss=1.0, norm=1.0)
    told = lines(9, 9, reports)[1:]
    assert [line for line in told if "skipped" in line] == told
    assert told[0] == "step 1: update skipped, the gradient is not finite (norm inf)"
    assert [re.search(r"(\d+) in a row", line) is not None for line in told] == [False, True, True, False]
    assert told[-1].endswith(" left  7 skipped"), "nine updates were tried"


def test_time_left_after_a_resume_is_that_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    pace = Pace(info(1000))
    assert pace.left() == "-:--:--"
    for step in range(901, 911):
        now[0] += 2
        pace.count(Report(step=step, stepped=True, loss=1.0, norm=1.0))
    now[0] += 500
    pace.pause(500)
    assert pace.left() == "0:03:00"
    assert pace.rate() == f"{10 * 32 / 20:,.0f} tokens/s"


def test_nothing_is_divided_by_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 5.0)
    assert Stopwatch().lap() > 0
    (_, first, _) = lines(1, 2, [skip(0, 1), *updates([1])])
    assert first.startswith("step 0: update skipped")
    assert lines(None, 0, list(updates([1])))[1].startswith("step 1/0  ")


def test_numbers_of_a_run_that_diverges_stay_short() -> None:
    (_, line) = lines(1, 1, [Report(step=1, stepped=True, loss=3.4e38, norm=1e12)])
    assert "loss 3.4e+38  norm 1e+12" in line


def test_a_script_that_does_not_say_when_it_starts_gets_no_lines() -> None:
    out = io.StringIO()
    observer = Lines(1, out)
    for report in updates([1, 2]):
        observer.report(report)
    assert out.getvalue() == ""


@contextmanager
def terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Observer, list[bytes]]]:
    """A bar on a pseudo-terminal, and what it wrote there."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    ours, theirs = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:
                return
            if not data:
                return
            written.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    out = os.fdopen(theirs, "w")
    bar = Bar(out)
    try:
        yield bar, written
    finally:
        bar.finish()
        out.close()
        reader.join(10)
        os.close(ours)


def frames(written: Sequence[bytes]) -> list[str]:
    """What stood on a line of the terminal, one after the other."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(written).decode())
    return [frame for frame in re.split(r"[\r\n]+", text) if frame]


@pytest.mark.parametrize("columns", [80, 60])
def test_the_bar_fits_and_says_all(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(columns, monkeypatch) as (bar, written):
        bar.start(info(100, "[bold]try"))
        for report in updates(range(51, 100)):
            bar.report(report)
        bar.report(skip(99, 1))
        bar.evaluated(Evaluation(99, 3.21, 64, 0.5))
    shown = frames(written)
    assert shown[0].startswith("[bold]try: 1.23 M parameters"), "a name is taken for markup"
    assert "step 99: update skipped, the gradient is not finite (norm inf)" in re.sub(r"\s+", " ", " ".join(shown))
    assert "step 99: held-out loss 3.2100 (64 samples)" in shown
    assert all(len(frame) <= columns for frame in shown), max(shown, key=len)
    everything = r" 0:00:00 left 1 skipped" if columns == 80 else ""
    assert re.search(r"100/100 +loss 1\.0000 [\d,]+ tokens/s" + everything, shown[-1])


def test_the_bar_does_not_flicker(monkeypatch: pytest.MonkeyPatch) -> None:
    started = time.perf_counter()
    with terminal(80, monkeypatch) as (bar, written):
        bar.start(info(5000))
        for report in updates(range(1, 5001)):
            bar.report(report)
    seconds = time.perf_counter() - started
    assert len(frames(written)) <= 4 + 5 * seconds, "redrawn for each update"
    assert b"\x1b[2J" not in b"".join(written), "the screen is cleared"


def test_the_bar_after_a_resume_begins_where_the_run_was(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(80, monkeypatch) as (bar, written):
        bar.start(info(100))
        for report in updates([91]):
            bar.report(report)
    assert " 91/100 " in frames(written)[-1]
