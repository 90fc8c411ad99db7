"""`tensorboard`: event files that TensorBoard's own reader understands."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import dsx
from dsx.contracts import Evaluation, Report, RunInfo
from dsx.errors import DsxError
from dsx.testing import check_plugin
from dsx.testing.models import Tangle
from dsx_observe import tensorboard

needs_tensorboard = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs the package tensorboard"
)


def write(folder: Path, steps: range) -> None:
    scalars = tensorboard.Scalars(None)
    scalars.start(RunInfo("try", 9, 10, 1, 2, 7, folder))
    for step in steps:
        scalars.report(Report(step=step, stepped=False))
        scalars.report(Report(step=step, stepped=True, loss=10.0 - step, norm=0.5, lr={"all": 0.25}))
    scalars.evaluated(Evaluation(steps[-1], 4.5, 8, 0.0))
    scalars.finish()


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events: Any = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


@needs_tensorboard
def test_conforms(ranks, tmp_path: Path) -> None:
    check_plugin("tensorboard", {"folder": str(tmp_path)}, ranks=ranks)


@needs_tensorboard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_reader_finds_what_was_reported(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    found = read(tmp_path)
    assert found["loss/training"] == [(1, 9.0), (2, 8.0), (3, 7.0)]
    assert found["loss/held_out"] == [(3, 4.5)]
    assert found["lr/all"] == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert all(rate > 0 for _, rate in found["speed/tokens_per_s"])
    assert {"gradient/norm", "gradient/scale", "gradient/skips", "memory/host"} <= found.keys()


@needs_tensorboard
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_resumed_run_hides_the_steps_it_repeats(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(4, 7))
    assert [step for step, _ in read(tmp_path)["loss/training"]] == [1, 2, 3, 4, 5, 6]


def test_a_missing_package_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda name: None)
    with pytest.raises(DsxError) as caught:
        dsx.prepare(Tangle(), {"observe": {"use": ["tensorboard"]}})
    assert "'tensorboard' needs the package tensorboard, which is not installed" in str(caught.value)
    assert "pip install 'dsx-engine[observe]'" in str(caught.value)
