"""The launcher, with real processes: what the user sees when ranks fail, are killed, or are told to stop."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dsx.errors import DsxError, RankFailed
from dsx.launch.blame import Ended, Failure, blamed
from dsx.launch.distributed import Ranks as Joined
from dsx.launch.distributed import join, leave, patience
from dsx.launch.launch import launch
from dsx.testing import Ranks

pytest_plugins = ["dsx.testing.fixtures"]

TARGETS = """
import atexit, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
from dsx.errors import DsxError
from dsx.launch.distributed import join

rank = int(os.environ["RANK"])

class Unusable(DsxError):
    exit_code = 2

def meet(path):
    joined = join(torch.device("cpu"))
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert (tensor.item(), joined.world, joined.owned) == (2, 2, True)
    assert os.environ.get("PYTHONPATH") == path
    print(f"rank {rank} met {joined.world} with {torch.get_num_threads()} threads")
    if rank == 1:
        sys.modules["__main__"]._EXIT_S = 0.5
        atexit.register(time.sleep, 60)

def look():
    print("terminal", sys.stdout.isatty())

def leave_17(folder):
    if rank == 1:
        pathlib.Path(folder, "died").write_text(str(time.time()))
        sys.exit(17)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)

def raise_in_rank_1():
    join(torch.device("cpu"))
    print("a hint on stderr", file=sys.stderr)
    if rank == 1:
        raise ZeroDivisionError("rank 1 only")
    dist.barrier()

def refuse():
    raise Unusable("the disk is full", where="/data", remedy="make room")

def die():
    join(torch.device("cpu"))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

def sleep(folder):
    pathlib.Path(folder, f"{rank}.tmp").write_text(str(os.getpid()))
    pathlib.Path(folder, f"{rank}.tmp").rename(pathlib.Path(folder, str(rank)))
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "launch_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def test_ranks_meet_and_end_with_0_even_if_one_hangs_at_exit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    handler = signal.getsignal(signal.SIGTERM)
    arguments = {"path": os.environ.get("PYTHONPATH")}
    assert launch("launch_targets:meet", arguments, nproc=2, log_dir=tmp_path / "logs") == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    out, err = capfd.readouterr()
    assert out == f"rank 0 met 2 with {threads} threads\n"
    assert err == ""
    (log,) = (tmp_path / "logs").glob("launch_*/round_1/rank_1/stdout.log")
    assert log.read_text().startswith("rank 1 met 2")
    assert dict(os.environ) == before
    assert signal.getsignal(signal.SIGTERM) is handler


def test_a_rank_that_exits_17_ends_all_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed with exit code 17") as caught:
        launch("launch_targets:leave_17", {"folder": str(tmp_path)}, nproc=2)
    assert time.time() - float((tmp_path / "died").read_text()) < 5
    assert (caught.value.rank, caught.value.exit_code) == (1, 17)


def test_an_exception_is_blamed_on_its_rank_with_traceback_and_stderr(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RankFailed, match="rank 1 failed with exit code 1") as caught:
        launch("launch_targets:raise_in_rank_1", {}, nproc=2, log_dir=tmp_path / "logs")
    text = str(caught.value)
    assert 'raise ZeroDivisionError("rank 1 only")' in text
    assert "ZeroDivisionError: rank 1 only" in text
    assert "a hint on stderr" in text
    assert f"where: {tmp_path / 'logs'}" in text
    assert "dsx/launch/worker.py" not in text
    assert "a hint on stderr" in capfd.readouterr().err


def test_the_same_dsx_error_on_all_ranks_is_shown_once_without_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RankFailed) as caught:
        launch("launch_targets:refuse", {}, nproc=2)
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert text.endswith(": the disk is full\n  where: /data\n  remedy: make room")
    assert text.startswith("rank")
    assert "Traceback" not in text
    assert capfd.readouterr() == ("", "")


def test_a_killed_rank_is_blamed_before_the_one_that_lost_it() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 was killed by SIGKILL \(exit code 137\)") as caught:
        launch("launch_targets:die", {}, nproc=2)
    assert (caught.value.rank, caught.value.exit_code) == (1, 137)


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)])
def test_no_rank_outlives_the_launcher(tmp_path: Path, stop: signal.Signals, code: int) -> None:
    with launcher("launch_targets:sleep", folder=str(tmp_path)) as process:
        files = [tmp_path / "0", tmp_path / "1"]
        assert eventually(lambda: all(file.exists() for file in files), within=60)
        process.send_signal(stop)
        assert process.wait(timeout=5) == code
    assert eventually(lambda: not any(alive(int(file.read_text())) for file in files), within=2)


def test_rank_0_sees_the_terminal() -> None:
    terminal, its_end = pty.openpty()
    try:
        with launcher("launch_targets:look", stdout=its_end) as process:
            assert process.wait(timeout=60) == 0
        assert os.read(terminal, 100) == b"terminal True\r\n"
    finally:
        os.close(terminal)
        os.close(its_end)


def test_what_cannot_be_launched_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(DsxError, match="the target of a launch must be module:function"):
        launch("launch_targets", {}, nproc=2)
    with pytest.raises(DsxError, match="the arguments of launch_targets:sleep cannot be sent") as caught:
        launch("launch_targets:sleep", {"folder": tmp_path}, nproc=2)
    assert "PosixPath is not JSON serializable" in str(caught.value)
    with pytest.raises(DsxError, match="the number of ranks must be at least 1"):
        launch("launch_targets:sleep", {}, nproc=0)


def test_a_rank_that_the_agent_had_to_kill_is_not_blamed() -> None:
    raised = {1: Failure(rank=1, code=1, time_ns=100_900_000_000)}
    assert blamed({1: Ended(1, 101), 0: Ended(137, 104)}, raised) == 1
    assert blamed({1: Ended(1, 101), 0: Ended(137, 101)}, raised) == 0
    assert blamed({0: Ended(143, 104), 1: Ended(137, 101)}, {}) == 1
    assert blamed({1: Ended(137, 101), 0: Ended(137, 104)}, {}) == 1


@pytest.mark.parametrize("present", ["RANK", "WORLD_SIZE"])
def test_a_partial_environment_is_refused_naming_what_is_missing(monkeypatch: pytest.MonkeyPatch, present: str) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name in (*variables, "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert join() == Joined(0, 1, 0, owned=False)
    monkeypatch.setenv(present, variables.pop(present))
    with pytest.raises(DsxError, match=f"but not {', '.join([*variables, 'MASTER_PORT'])}"):
        join()


def test_a_wrong_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DsxError, match="RANK is not below WORLD_SIZE") as caught:
        join()
    assert "RANK=2, WORLD_SIZE=2" in str(caught.value)
    monkeypatch.setenv("RANK", "two")
    with pytest.raises(DsxError, match="RANK is not a number"):
        join()


def join_twice() -> tuple[Joined, Joined, bool]:
    first = join(torch.device("cpu"), timeout_s=30)
    second = join(torch.device("cpu"))
    leave(second)
    assert dist.is_initialized()
    leave(first)
    return first, second, dist.is_initialized()


def wait_of_channels() -> float:
    joined = join(torch.device("cpu"), timeout_s=77)
    found = patience().total_seconds()
    leave(joined)
    return found


def test_channels_wait_as_long_as_the_run_says(ranks: Ranks) -> None:
    assert ranks.run(wait_of_channels, group=False) == [77.0, 77.0]


def join_alone_of_two() -> None:
    if os.environ["RANK"] == "1":
        join(torch.device("cpu"), timeout_s=1)


def test_the_group_that_is_there_is_taken_and_left_alone(ranks: Ranks) -> None:
    for rank, (first, second, remains) in enumerate(ranks.run(join_twice, group=False)):
        assert first == Joined(rank, 2, rank, owned=True)
        assert second == Joined(rank, 2, rank, owned=False)
        assert not remains


def test_ranks_that_do_not_come_are_reported(ranks: Ranks) -> None:
    _, error = ranks.errors(join_alone_of_two, group=False)
    assert isinstance(error, DsxError)
    assert "rank 1 could not join the process group of 2" in str(error)
    assert "where: 127.0.0.1:" in str(error)


@contextmanager
def launcher(target: str, stdout: int | None = None, **arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that launches `target` on two ranks."""
    script = f"import sys; from dsx.launch.launch import launch; sys.exit(launch({target!r}, {arguments!r}, 2))"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=stdout)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition: Callable[[], bool], within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False
