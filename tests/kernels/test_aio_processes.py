"""The file engine and processes: those that end, are killed, are forked, and share a folder."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from dsx.errors import DsxError
from dsx_kernels.aio import BLOCK, PIECE, Files, aligned, free, home, missing
from kernels.aio import failing, noise

if reason := missing():
    pytest.skip(f"no file engine here: {reason}", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path, 8 * PIECE)
    yield made
    made.close()


_AT_EXIT = """
import os, signal, sys
from dsx_kernels.aio import Files, aligned
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
files = Files(sys.argv[1], 8 << 20)
if sys.argv[1].endswith("wait"):
    os.dup2(os.open("/dev/urandom", os.O_RDWR), files._engine._descriptors[0])
memory = aligned(8 << 20)
tickets = [files.read(0, memory) for _ in range(1000)]
if sys.argv[1].endswith("wait"):
    print("waiting", flush=True)
    tickets[-1].wait()
"""


def test_a_process_that_ends(tmp_path: Path) -> None:
    """105: with requests under way, by itself, and by Ctrl-C in the middle of waiting; nothing stays (99)."""
    (tmp_path / "ends").mkdir()
    (tmp_path / "wait").mkdir()
    both = {
        name: subprocess.Popen(
            [sys.executable, "-c", _AT_EXIT, str(tmp_path / name)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for name in ("ends", "wait")
    }
    waiting = both["wait"]
    assert waiting.stdout is not None and waiting.stdout.readline() == b"waiting\n"
    time.sleep(0.1)
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate(timeout=120)
    assert said.splitlines()[-1] == b"KeyboardInterrupt" and waiting.returncode == -signal.SIGINT
    _, said = both["ends"].communicate(timeout=120)
    assert (both["ends"].returncode, said) == (0, b"")
    assert [os.listdir(tmp_path / name) for name in both] == [[], []]


def fork(work: Callable[[], None]) -> int:
    """A process that does `work` and ends with 0, or with 1 and a traceback.

    It collects no garbage: what earlier tests left may be a process group, whose destructor waits for threads that a
    fork has not got, for ever.
    """
    gc.disable()
    child = os.fork()
    if child:
        gc.enable()
    else:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def in_child(work: Callable[[], None]) -> int:
    return ended(fork(work))


def sleeper(folder: Path) -> int:
    """A process with files in a folder, that sleeps."""
    reader, writer = os.pipe()

    def work() -> None:
        made = Files(folder, PIECE)
        made.write(0, noise(PIECE)).wait()
        os.write(writer, b"x")
        time.sleep(600)

    child = fork(work)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.close(reader)
    return child


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    """99; and never what belongs to one that lives, or that is none of ours."""
    killed, living = sleeper(tmp_path), sleeper(tmp_path)
    (tmp_path / "dsx-notes").mkdir()
    before = set(os.listdir(tmp_path))
    try:
        os.kill(killed, signal.SIGKILL)
        ended(killed)
        files = Files(tmp_path, PIECE)
        gone = before - set(os.listdir(tmp_path))
        assert [f"-{killed}-" in name for name in gone] == [True]
        files.close()
        assert set(os.listdir(tmp_path)) == before - gone
    finally:
        os.kill(living, signal.SIGKILL)
        ended(living)
    Files(tmp_path, PIECE).close()
    assert os.listdir(tmp_path) == ["dsx-notes"]


def test_what_is_left_counts_as_free(tmp_path: Path) -> None:
    new = tmp_path / "not" / "there"
    killed = sleeper(tmp_path)
    os.kill(killed, signal.SIGKILL)
    ended(killed)
    assert free([tmp_path, new]) % 2 == 0 and free(tmp_path) > PIECE
    assert os.listdir(tmp_path) == []


def test_several_processes_in_one_folder(tmp_path: Path) -> None:
    """Each makes, uses and drops files while the others sweep."""

    def work() -> None:
        for _ in range(30):
            files = Files(tmp_path, 4 * BLOCK, threads=1)
            data, into = noise(3 * BLOCK), aligned(3 * BLOCK)
            files.write(BLOCK, data).wait()
            files.read(BLOCK, into).wait()
            assert torch.equal(into, data)
            assert files.paths[0].exists(), "another process removed it"
            files.close()

    children = [fork(work) for _ in range(3)]
    assert [ended(child) for child in children] == [0, 0, 0]
    assert os.listdir(tmp_path) == []


def test_a_directory_made_anew_while_another_process_sweeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is that of the one before, whose lock the sweeper has open, and gets."""
    before, locked, made = home.Home(tmp_path), home._locked, []

    def late(lock: int) -> bool:
        monkeypatch.setattr(home, "_locked", locked)
        before.remove()
        made.append(home.Home(tmp_path))
        made[0].data.touch()
        return locked(lock)

    monkeypatch.setattr(home, "_locked", late)
    home.sweep(tmp_path)
    assert made[0].path == before.path and made[0].data.exists()
    made[0].remove()


def test_leftovers_on_a_network_filesystem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A lock of this system's is believed; whether another's is held, nobody can see."""
    monkeypatch.setattr(home, "kind", lambda folder: None)
    boot = home._boot()
    ours, others = tmp_path / f"dsx-here-1-{boot}-0", tmp_path / f"dsx-there-1-{'a' * 12}-0"
    for left in (ours, others):
        left.mkdir()
        (left / "data").write_bytes(b"x")
    with caplog.at_level(logging.WARNING, "dsx.kernels"):
        home.sweep(tmp_path)
    assert os.listdir(tmp_path) == [others.name]
    (warning,) = caplog.messages
    assert others.name in warning and "left alone" in warning


def test_a_fork_has_no_part_in_files(files: Files, tmp_path: Path) -> None:
    """It can use them no more, keeps no lock, and leaves them alone as it ends."""
    data = noise(4 * PIECE)
    ticket = files.write(0, data)

    def work() -> None:
        for call in (lambda: files.write(0, data), ticket.wait, files.sync, lambda: files.counts):
            with pytest.raises(DsxError, match=f"those of process {os.getppid()}, from which this one was forked"):
                call()
        files.close()
        assert not [path for path in Path("/proc/self/fd").iterdir() if path.resolve().is_relative_to(tmp_path)]
        mine = Files(tmp_path, PIECE)
        mine.write(0, data[:PIECE]).wait()
        mine.close()

    assert in_child(work) == 0
    into = aligned(4 * PIECE)
    ticket.wait()
    files.read(0, into).wait()
    assert torch.equal(into, data) and files.paths[0].exists()


def test_a_fork_in_the_middle_of_reading(files: Files) -> None:
    """Pages are shared with the child, and still filled."""
    data, into = noise(8 * PIECE), aligned(8 * PIECE)
    files.write(0, data).wait()
    for _ in range(10):
        into.zero_()
        ticket = files.read(0, into)
        child = fork(lambda: None)
        ticket.wait()
        assert ended(child) == 0
        assert torch.equal(into, data)


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """At set-up, and when it is set later."""

    def limited() -> None:
        import resource

        files = Files(tmp_path, 4 * PIECE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (PIECE + 512, PIECE + 512))
        files.write(0, noise(PIECE)).wait()
        error = failing(files.write(PIECE, noise(PIECE)))
        assert error.what == "an offload file cannot be written: File too large"
        with pytest.raises(DsxError, match=r"no offload file of 2,097,152 bytes can be made in .*: File too large"):
            Files(tmp_path, 2 * PIECE)
        files.close()

    assert in_child(limited) == 0
