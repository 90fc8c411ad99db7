"""All observers in a real `dsx run`, and a report of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsx.cli import call

MANIFEST = """
[run]
name = "tiny"
steps = 4
out = "out"

[batch]
micro = 2

[model]
factory = "dsx_text:gpt"
layers = 1
width = 16
heads = 2
context = 16

[data]
source = "dsx_text:files"
files = "words.txt"
context = 16

[evaluate]
every = 2
samples = 4

[observe]
use = ["progress", "jsonl", "trace"]

[observe.trace]
first = 2
steps = 1
"""


def test_a_run_is_seen_by_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "run.toml").write_text(MANIFEST)
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    assert call(["run", "run.toml"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told[0].startswith("tiny: ") and told[0].endswith("4 steps of 2 samples, 1 rank")
    assert any(line.startswith("step 4/4  loss ") for line in told)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    kinds = [(line["kind"], line["step"]) for line in lines]
    updates, evaluations = ([step for kind, step in kinds if kind == name] for name in ("update", "evaluation"))
    assert (kinds[0], updates, evaluations) == (("run", 0), [1, 2, 3, 4], [0, 2, 4])
    assert lines[0]["tokens"] == 16
    assert (tmp_path / "out" / "trace" / "rank0.json.gz").stat().st_size > 1000
    assert call(["report", "out"]) == 0
    assert "<title>tiny · dsx report</title>" in (tmp_path / "report.html").read_text("utf-8")
