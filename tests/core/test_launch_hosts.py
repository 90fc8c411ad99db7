"""Launches on several hosts, all of them this one; tests/multihost has hosts that can be cut off."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsx.errors import DsxError
from dsx.launch.blame import Ended, Failure, Losses, blamed, rank_failed
from dsx.launch.config import LaunchConfig
from dsx.launch.launch import launch_with
from dsx.launch.worker import rank_folder

TARGETS = """
import os, torch, torch.distributed as dist
from dsx.launch.distributed import join

def fail_on_rank_1():
    ranks = join(torch.device("cpu"))
    assert ranks.world == 2
    dist.barrier()
    if ranks.rank == 1:
        raise ZeroDivisionError("on one host")
    dist.barrier()
"""
GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:43185."


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "host_targets.py").write_text(TARGETS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def deaf() -> Iterator[int]:
    """The port of a server that never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_every_host_names_the_rank_that_failed_with_its_traceback(port: int) -> None:
    script = (
        "import sys; from dsx.cli import call; from dsx.launch.config import LaunchConfig\n"
        "from dsx.launch.launch import launch_with\n"
        f"config = LaunchConfig(nproc=1, min_hosts=2, max_hosts=2, endpoint='127.0.0.1:{port}', timeout_s=60)\n"
        "try: launch_with(config, 'host_targets:fail_on_rank_1', {})\n"
        "except Exception as error: print(error); sys.exit(error.exit_code)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    hosts = [
        subprocess.Popen([sys.executable, "-c", script], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for host in hosts:
        out, _ = host.communicate(timeout=60)
        assert out.startswith("rank 1 failed with exit code 1\n")
        assert "ZeroDivisionError: on one host" in out
        assert f"where: {socket.gethostname()}:/" in out
        assert host.returncode == 1


def test_hosts_that_do_not_come_are_missed(port: int) -> None:
    config = LaunchConfig(nproc=1, min_hosts=2, max_hosts=3, endpoint=f"127.0.0.1:{port}", timeout_s=1)
    with pytest.raises(DsxError, match="the hosts of this run did not come together within 1 s") as caught:
        launch_with(config, "host_targets:fail_on_rank_1", {})
    assert "expected: 2 to 3 hosts" in str(caught.value)
    assert f"where: 127.0.0.1:{port}" in str(caught.value)


def test_a_meeting_place_that_does_not_answer_is_named(deaf: int) -> None:
    config = LaunchConfig(nproc=1, max_hosts=2, endpoint=f"127.0.0.1:{deaf}", timeout_s=1)
    start = time.monotonic()
    with pytest.raises(DsxError, match="no answer within 1 s where the hosts of this run meet") as caught:
        launch_with(config, "host_targets:fail_on_rank_1", {})
    assert "let its port through" in str(caught.value)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("endpoint", ["host:port", "host:70000", ":1"])
def test_a_wrong_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(DsxError, match="--rdzv-endpoint is not HOST:PORT") as caught:
        launch_with(LaunchConfig(nproc=1, max_hosts=2, endpoint=endpoint), "host_targets:fail_on_rank_1", {})
    assert endpoint in str(caught.value)


def test_an_unknown_name_is_refused() -> None:
    config = LaunchConfig(nproc=1, max_hosts=2, endpoint="no-such-host.invalid:29400")
    with pytest.raises(DsxError, match="the name in --rdzv-endpoint is not known here"):
        launch_with(config, "host_targets:fail_on_rank_1", {})


def test_the_loss_of_another_rank_is_not_blamed_even_if_its_clock_is_behind() -> None:
    lost = Failure(rank=0, code=1, time_ns=1_000_000_000, traceback=f"Traceback:\n{GLOO}\n")
    own = Failure(rank=1, code=1, time_ns=9_000_000_000, traceback="Traceback:\nValueError: x\n")
    assert blamed({0: Ended(1, 1), 1: Ended(1, 9)}, {0: lost, 1: own}) == 1


def test_hosts_merge_what_they_know_and_a_lost_link_is_told_in_words() -> None:
    lost = Failure(rank=0, code=1, time_ns=1, traceback=f"Traceback:\n{GLOO}\n")
    here = Losses({0: Ended(1, 1)}, {0: lost}, {0: "a:/tmp/rank_0"}, {0: ""})
    there = Losses({}, {}, {}, {})
    assert here and not there
    error = rank_failed(Losses.merged([there.to_json(), here.to_json()]))
    assert error.what == "rank 0 lost another rank (exit code 1)"
    assert "look for a host that is gone, a link that is cut" in str(error)
    assert error.where == "a:/tmp/rank_0"


def test_a_rank_that_was_killed_for_want_of_memory_is_told_so(tmp_path: Path) -> None:
    for rank in (0, 1):
        rank_folder(tmp_path, rank).mkdir(parents=True)
    ended = {0: Ended(1, 4), 1: Ended(128 + signal.SIGKILL, 2)}
    starved = Losses.of(ended, tmp_path, "a", starved=True)
    error = rank_failed(Losses.merged([Losses({}, {}, {}, {}).to_json(), starved.to_json()]))
    assert error.what == "rank 1 was killed for want of memory (SIGKILL, exit code 137)"
    assert "`dsx plan`" in str(error)
    killed = rank_failed(Losses.of(ended, tmp_path, "a"))
    assert killed.what == "rank 1 was killed by SIGKILL (exit code 137)"


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_a_launch_leaves_no_descriptors_open(tmp_path: Path) -> None:
    """Case 97: to look through all descriptors for a link must not double them."""
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        launch_with(LaunchConfig(nproc=1), "os:getcwd", {})
    gc.collect()  # torch's agent and its store refer to each other
    assert len(os.listdir("/proc/self/fd")) <= before + 3
