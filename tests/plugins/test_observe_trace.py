"""`trace`: one file for each rank, of the chosen updates and no others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch.distributed as dist

import dsx
from dsx.contracts import Report, RunInfo
from dsx.errors import DsxError
from dsx.testing import check_plugin
from dsx.testing.models import Tangle, tokens
from dsx_observe.trace import Options, Tracer


def train(folder: str, steps: int, first: int, count: int) -> None:
    options = {"folder": folder, "first": first, "steps": count}
    tables = {"batch": {"accumulation": 2}, "observe": {"use": ["trace"], "trace": options}}
    engine = dsx.prepare(Tangle(), tables)
    for step in range(steps):
        engine.train_step(tokens(step, micro, dist.get_rank()) for micro in range(2))
    engine.close()


def marks(path: Path) -> list[str]:
    """Names of the updates in a trace, which must also hold the model's work."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {str(event.get("name")) for event in events}
    assert any("aten::" in name for name in names)
    return sorted(name for name in names if name.startswith("ProfilerStep"))


def test_conforms(ranks, tmp_path: Path) -> None:
    check_plugin("trace", {"folder": str(tmp_path), "first": 2, "steps": 1}, ranks=ranks)


def test_each_rank_has_a_file_of_the_chosen_updates(ranks, tmp_path: Path) -> None:
    ranks.run(train, str(tmp_path), 5, 3, 2)
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    for rank in range(2):
        assert len(marks(tmp_path / "trace" / f"rank{rank}.json.gz")) == 2


@pytest.mark.parametrize(("steps", "first", "count", "found"), [(3, 1, 1, 1), (3, 2, 8, 2), (2, 2, 3, 1)])
def test_the_first_update_and_a_run_that_ends_early(
    ranks, tmp_path: Path, steps: int, first: int, count: int, found: int
) -> None:
    ranks.run(train, str(tmp_path), steps, first, count, world=1)
    assert len(marks(tmp_path / "trace" / "rank0.json.gz")) >= found


def test_before_and_after_it_nothing_is_profiled(tmp_path: Path) -> None:
    tracer = Tracer(Options(first=3, steps=1), 0)
    tracer.start(RunInfo("try", 9, 10, 1, 2, 7, tmp_path))
    running = []
    for step in range(1, 6):
        tracer.report(Report(step=step, stepped=False))
        tracer.report(Report(step=step, stepped=True, loss=1.0, norm=1.0))
        running.append(tracer._profile is not None)
    assert running == [True, True, False, False, False]


def test_a_run_that_ends_before_is_refused(tmp_path: Path) -> None:
    tracer = Tracer(Options(), 0)
    with pytest.raises(DsxError) as caught:
        tracer.start(RunInfo("try", 9, 10, 1, 2, 7, tmp_path))
    assert "'trace' is to begin at update 10, and the run has 9" in str(caught.value)
    assert "where: observe.trace.first" in str(caught.value)
