"""Stopping, starting again, and what ranks return, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dsx.errors import DsxError, RankFailed
from dsx.launch.config import LaunchConfig
from dsx.launch.launch import launch, launch_with
from dsx.launch.stop import install_handlers, stop_requested
from multihost.hosts import alive, eventually

TARGETS = """
import os, pathlib, sys, time
from dsx.errors import DsxError
from dsx.launch.stop import install_handlers, stop_requested

rank = int(os.environ["RANK"])

class Misuse(DsxError):
    exit_code = 2

def heed(folder, save):
    with install_handlers():
        while not stop_requested():
            pathlib.Path(folder, f"pid_{rank}").write_text(str(os.getpid()))
            time.sleep(0.05)
        while not save:
            time.sleep(1)
    pathlib.Path(folder, f"saved_{rank}").write_text(str(stop_requested()))

def train(folder):
    import torch, dsx
    engine = dsx.prepare(torch.nn.Linear(2, 1))
    with dsx.stopping(engine) as asked:
        while True:
            engine.backward(engine(torch.ones(2, 2)).square().mean())
            if number := asked(engine.step()):
                break
            pathlib.Path(folder, f"pid_{rank}").write_text(str(os.getpid()))
    own = pathlib.Path(os.environ["DSX_LAUNCH_ROUND"], f"rank_{rank}")
    assert not (own / "heeds_stop").exists()
    pathlib.Path(folder, f"saved_{rank}").write_text(f"{number} after {engine.steps}")
    assert not engine.words
    engine.close()

def give_7():
    return 7 if rank == 1 else None

def die_once(folder):
    try:
        pathlib.Path(folder, "died").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), 9)

def misuse(folder):
    pathlib.Path(folder, str(time.time_ns())).touch()
    raise Misuse("no such option")
"""


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stop_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@contextmanager
def launcher(folder: Path, target: str = "heed", **arguments: bool) -> Iterator[subprocess.Popen[str]]:
    """A process group of its own that launches `target` on two ranks, once these have asked."""
    call = f"launch('stop_targets:{target}', { ({'folder': str(folder), **arguments})!r}, 2)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", f"import sys; from dsx.launch.launch import launch; sys.exit({call})"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        eventually(lambda: all((folder / f"pid_{rank}").exists() for rank in (0, 1)), 60)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sigterm_lets_all_ranks_save(tmp_path: Path) -> None:
    with launcher(tmp_path, save=True) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 143
        assert process.stderr is not None
        assert process.stderr.read().startswith("SIGTERM: the ranks finish their step and stop; a second signal ends")
    assert [(tmp_path / f"saved_{rank}").read_text() for rank in (0, 1)] == ["15", "15"]


def test_a_loop_of_ones_own_ends_on_all_ranks_after_the_same_update(tmp_path: Path) -> None:
    with launcher(tmp_path, "train") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
    one, other = ((tmp_path / f"saved_{rank}").read_text() for rank in (0, 1))
    assert one == other
    assert one.startswith("15 after ")


def test_ctrl_c_lets_ranks_save_and_again_ends_them_at_once(tmp_path: Path) -> None:
    with launcher(tmp_path, save=False) as process:
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(5) == 130
    pids = [int((tmp_path / f"pid_{rank}").read_text()) for rank in (0, 1)]
    assert not any(alive(pid) for pid in pids)
    assert not list(tmp_path.glob("saved_*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_alone_the_first_signal_asks_and_the_second_acts(number: signal.Signals) -> None:
    came = []
    before = signal.signal(number, lambda number, frame: came.append(number))
    try:
        with install_handlers():
            assert stop_requested() == 0
            os.kill(os.getpid(), number)
            assert (stop_requested(), came) == (number, [])
            os.kill(os.getpid(), number)
            assert (stop_requested(), came) == (number, [number])
        assert stop_requested() == 0
        os.kill(os.getpid(), number)
        assert (stop_requested(), came) == (0, [number, number])
    finally:
        signal.signal(number, before)


def test_what_a_rank_returns_is_the_exit_code() -> None:
    assert launch("stop_targets:give_7", {}, nproc=2) == 7


def test_a_killed_rank_starts_again_with_all_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = LaunchConfig(nproc=2, max_restarts=1)
    assert launch_with(config, "stop_targets:die_once", {"folder": str(tmp_path)}) == 0
    first, *_, left, again = capfd.readouterr().err.splitlines()
    assert first.endswith("was killed by SIGKILL (exit code 137)")
    assert (left, again) == ("1 of 1 restarts left", "all ranks start again: 2 on 1 host")


def test_misuse_is_not_tried_again(tmp_path: Path) -> None:
    (tmp_path / "seen").mkdir()
    with pytest.raises(RankFailed, match="no such option") as caught:
        launch_with(LaunchConfig(nproc=1, max_restarts=3), "stop_targets:misuse", {"folder": str(tmp_path / "seen")})
    assert caught.value.exit_code == 2
    assert len(list((tmp_path / "seen").iterdir())) == 1


def test_what_cannot_be_a_launch_is_refused() -> None:
    with pytest.raises(DsxError, match="several hosts need a place to meet") as caught:
        LaunchConfig(nproc=1, max_hosts=2)
    assert "--rdzv-endpoint HOST:PORT" in str(caught.value)
    with pytest.raises(DsxError, match="a range must rise") as caught:
        LaunchConfig(nproc=1, min_hosts=3, max_hosts=2, endpoint="a:1")
    assert "found: 3:2" in str(caught.value)
    with pytest.raises(DsxError, match="the timeout must be at least a second"):
        LaunchConfig(nproc=1, timeout_s=0.5)
