"""`jsonl`: valid JSON, the same numbers on every rank, whole lines after a kill, and a resume that says so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import dsx
from dsx.contracts import Evaluation, Observer, Report, RunInfo
from dsx.errors import DsxError
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing import check_plugin
from dsx.testing.models import Tangle, tokens
from dsx_observe.jsonl import Writer

STEPS = 3


class Recording(Observer):
    """A plugin that keeps every report."""

    descriptor = Descriptor(name="recording", section="observe", contract=1, fills={"observers": Fill()})

    def __init__(self) -> None:
        self.reports: list[Report] = []

    @hook
    def dsx_observe(self) -> list[Part]:
        return [Part("observers", lambda ctx: self)]

    def report(self, report: Report) -> None:
        self.reports.append(report)


def read(folder: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (folder / "metrics.jsonl").read_text("utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def train(folder: str, hurt: int | None = None) -> list[dict[str, Any]]:
    """On each rank: what was reported to it."""
    recording = Recording()
    tables = {
        "batch": {"accumulation": 2},
        "observe": {"use": ["jsonl", "recording"], "jsonl": {"folder": folder}},
    }
    engine = dsx.prepare(Tangle().double(), tables, plugins={"recording": recording})
    for step in range(STEPS):
        for micro in range(2):
            loss = engine(*tokens(step, micro, dist.get_rank()))
            engine.backward(loss * math.nan if step == hurt else loss)
            engine.step()
    engine.close()
    names = ("step", "loss", "norm", "scale", "skipped", "skips", "lr")
    kept = [report for report in recording.reports if report.loss is not None]
    return [{name: getattr(report, name) for name in names} for report in kept]


def test_conforms(ranks, tmp_path: Path) -> None:
    check_plugin("jsonl", {"folder": str(tmp_path)}, ranks=ranks)


def test_every_rank_has_the_numbers_that_one_writes(ranks, tmp_path: Path) -> None:
    first, second = ranks.run(train, str(tmp_path / "new" / "run"))
    assert first == second
    run, *written = read(tmp_path / "new" / "run")
    assert run == {"kind": "run", "step": 0, "world": 2}
    assert [{name: line[name] for name in first[0]} for line in written] == first
    assert all(line["world"] == 2 and line["memory"]["host"] > 1e6 for line in written)
    assert [line["seconds"] is None for line in written] == [True, False, False]
    assert list(tmp_path.rglob("*.jsonl")) == [tmp_path / "new" / "run" / "metrics.jsonl"]


def test_numbers_that_are_not_finite_have_names(ranks, tmp_path: Path) -> None:
    ranks.run(train, str(tmp_path), 1, world=1)
    line = read(tmp_path)[2]
    assert (line["skipped"], line["skips"], line["step"], line["lr"]) == (True, 1, 1, {})
    assert (line["loss"], line["norm"]) == ("nan", "nan")
    assert math.isnan(float(line["norm"]))


def start(folder: Path, steps: int = 9) -> Writer:
    writer = Writer(None, 1)
    writer.start(RunInfo("try", steps, 10, 1, 2, 7, folder))
    return writer


def test_a_run_says_what_it_is_and_how_fast(tmp_path: Path) -> None:
    writer = start(tmp_path)
    writer.evaluated(Evaluation(0, math.inf, 4, 0.25))
    writer.report(Report(step=1, stepped=True, loss=1.5, norm=0.5, lr={"a": 0.1, "b": 0.2}))
    writer.finish()
    run, evaluation, update = read(tmp_path)
    assert run == {
        "kind": "run",
        "step": 0,
        "world": 1,
        "name": "try",
        "planned": 9,
        "parameters": 10,
        "samples": 2,
        "tokens": 7,
    }
    assert evaluation == {"kind": "evaluation", "step": 0, "loss": "inf", "samples": 4, "seconds": 0.25}
    assert update["lr"] == {"a": 0.1, "b": 0.2}
    assert update["tokens_per_s"] == pytest.approx(14 / update["seconds"])


def test_lines_are_written_as_they_come(tmp_path: Path) -> None:
    writer = start(tmp_path)
    writer.report(Report(step=1, stepped=True, loss=1.5, norm=0.5))
    assert len(read(tmp_path)) == 2, "a kill here would lose the line"
    writer.finish()


def test_a_resumed_run_appends_and_says_from_where(tmp_path: Path) -> None:
    for first, last in ((1, 4), (3, 5)):
        writer = start(tmp_path)
        for step in range(first, last):
            writer.report(Report(step=step, stepped=True, loss=float(first), norm=0.5))
        writer.finish()
    lines = [(line["kind"], line["step"]) for line in read(tmp_path)]
    assert lines[:4] == [("run", 0), ("update", 1), ("update", 2), ("update", 3)]
    assert lines[4:] == [("run", 2), ("update", 3), ("update", 4)]


def test_a_line_cut_by_a_kill_is_removed_before_more_is_written(tmp_path: Path) -> None:
    writer = start(tmp_path)
    writer.report(Report(step=1, stepped=True, loss=1.5, norm=0.5))
    writer.finish()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind":"update","st')
    writer = start(tmp_path)
    writer.report(Report(step=2, stepped=True, loss=1.5, norm=0.5))
    writer.finish()
    assert [line["step"] for line in read(tmp_path)] == [0, 1, 1, 2]


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = dsx.prepare(Tangle(), {"observe": {"use": ["jsonl", "tensorboard", "trace"], "trace": {"first": 1}}})
    engine.backward(engine(*tokens(0, 0, 0)))
    engine.step()
    engine.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DsxError) as caught:
        dsx.prepare(Tangle(), {"observe": {"use": ["jsonl"], "jsonl": {"folder": str(tmp_path / "file")}}})
    assert f"'jsonl' cannot write {tmp_path}/file/metrics.jsonl" in str(caught.value)
    assert "where: [observe.jsonl]" in str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = start(tmp_path)
    with pytest.raises(DsxError, match="'jsonl' cannot write") as caught:
        writer.report(Report(step=1, stepped=True, loss=1.5, norm=0.5))
    assert "No space left on device" in str(caught.value)
    writer.finish()
