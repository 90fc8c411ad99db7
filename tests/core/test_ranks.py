"""The pool of ranks: real processes, real gloo groups."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from dsx.errors import DsxError
from dsx.testing import Ranks, RanksError

pytest_plugins = ["dsx.testing.fixtures"]


def total(value: int) -> torch.Tensor:
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor


def place() -> tuple[int, int, str, str, str | None]:
    return dist.get_rank(), dist.get_world_size(), os.environ["RANK"], os.getcwd(), os.environ.get("DSX_TEST_WORD")


def draws() -> tuple[float, float]:
    return random.random(), torch.rand(1).item()


def process_id() -> int:
    return os.getpid()


def fail_on(rank: int, error: Exception) -> None:
    if dist.get_rank() == rank:
        raise error


def fail_in_turn() -> None:
    time.sleep(0.3 * (1 - dist.get_rank()))
    raise ValueError(f"by rank {dist.get_rank()}")


def fail_while_other_waits() -> None:
    fail_on(1, ValueError("alone"))
    dist.barrier()


def exit_while_other_waits() -> None:
    if dist.get_rank() == 1:
        os._exit(17)
    dist.barrier()


def abort() -> None:
    os.abort()


def nap() -> None:
    time.sleep(60)


def unpicklable_error() -> None:
    error = KeyError("where")
    error.extra = lambda: None  # type: ignore[attr-defined]
    raise error


def warn() -> None:
    warnings.warn("old ways", stacklevel=1)


def group_from_environment() -> bool:
    before = dist.is_initialized()
    dist.init_process_group("gloo")
    return not before and dist.get_world_size() == 2


def test_results_come_by_rank_from_a_group_of_exactly_that_size(ranks: Ranks) -> None:
    assert ranks.run(total, 1, world=2) == [torch.tensor([3])] * 2
    assert ranks.run(total, value=5, world=1) == [torch.tensor([5])]


def test_a_call_sees_the_directory_and_environment_of_the_test(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DSX_TEST_WORD", "seen")
    assert ranks.run(place) == [(rank, 2, str(rank), str(tmp_path), "seen") for rank in range(2)]
    monkeypatch.delenv("DSX_TEST_WORD")
    assert ranks.run(place)[0][-1] is None


def test_seeds_are_fresh_in_every_call_and_processes_are_reused(ranks: Ranks) -> None:
    assert len({*ranks.run(draws), *ranks.run(draws)}) == 1
    assert ranks.run(process_id) == ranks.run(process_id)


def test_a_function_can_make_the_group_itself(ranks: Ranks) -> None:
    assert ranks.run(group_from_environment, group=False) == [True, True]
    assert ranks.run(total, 0) == [torch.tensor([1])] * 2


def test_every_failing_rank_is_shown_with_its_traceback_and_the_first_one_first(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="fail_in_turn: 2 of 2 ranks failed, rank 1 first") as caught:
        ranks.run(fail_in_turn)
    text = str(caught.value)
    first, second = text.index("[rank 1]"), text.index("[rank 0, 0.")
    assert first < text.index("ValueError: by rank 1") < second < text.index("ValueError: by rank 0")
    assert 'raise ValueError(f"by rank {dist.get_rank()}")' in text
    assert "rank_worker.py" not in text
    assert [str(error) for error in caught.value.errors] == ["by rank 0", "by rank 1"]


def test_a_rank_that_waits_for_a_failed_one_is_stopped_and_replaced(ranks: Ranks) -> None:
    before = ranks.run(process_id)
    started = time.monotonic()
    with pytest.raises(RanksError, match="rank 1 first") as caught:
        ranks.run(fail_while_other_waits)
    assert time.monotonic() - started < 10
    assert "rank 0 was still running 2 s after rank 1 had failed; it was at" in str(caught.value)
    assert "in fail_while_other_waits" in str(caught.value.errors[0])
    assert set(before) & set(ranks.run(process_id)) == {before[1]}
    assert ranks.run(total, 1) == [torch.tensor([3])] * 2


def test_a_timeout_shows_where_each_rank_is(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match=r"rank 0 was still running after 0\.5 s; it was at") as caught:
        ranks.run(nap, world=1, timeout=0.5)
    assert "in nap" in str(caught.value)


def test_a_rank_that_dies_is_blamed_before_those_that_lost_it(ranks: Ranks) -> None:
    with pytest.raises(RanksError, match="rank 1 first") as caught:
        ranks.run(exit_while_other_waits)
    assert "the process exited with code 17, without an exception" in str(caught.value.errors[1])
    (error,) = ranks.errors(abort, world=1)
    assert isinstance(error, ChildProcessError)
    assert "killed by SIGABRT" in str(error)
    assert "in abort" in str(error)


def test_errors_gives_the_exception_objects(ranks: Ranks) -> None:
    fine, error = ranks.errors(fail_on, 1, DsxError("no room", where="/data", remedy="make room"))
    assert fine is None
    assert isinstance(error, DsxError)
    assert (error.where, error.remedy) == ("/data", "make room")
    (error,) = ranks.errors(unpicklable_error, world=1)
    assert type(error) is RuntimeError
    assert str(error) == "KeyError: 'where'"


def test_a_test_module_that_cannot_be_imported_by_name_is_loaded_from_its_file(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pytest --import-mode=importlib` has them: dotted names that no entry of sys.path leads to."""
    path = tmp_path / "test_elsewhere.py"
    path.write_text("class Mine(tuple): pass\ndef swap(pair): return Mine((pair[1], pair[0]))\n")
    spec = importlib.util.spec_from_file_location("some.folder.test_elsewhere", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    for name, entry in (("some", ModuleType("some")), ("some.folder", ModuleType("some.folder")), (spec.name, module)):
        monkeypatch.setitem(sys.modules, name, entry)
    spec.loader.exec_module(module)
    (result,) = ranks.run(module.swap, module.Mine((1, 2)), world=1)
    assert type(result) is module.Mine
    assert result == (2, 1)


def test_what_cannot_travel_is_refused_in_words(ranks: Ranks) -> None:
    def closure() -> None: ...

    with pytest.raises(TypeError, match=r"closure cannot run on ranks(.|\n)*Move it to the top level of a module"):
        ranks.run(closure)
    with pytest.raises(TypeError, match="cannot run on ranks"):
        ranks.run(lambda: None)
    with pytest.raises(TypeError, match="the arguments of total cannot be sent to ranks"):
        ranks.run(total, lambda: None)
    with pytest.raises(ValueError, match="world=5 does not fit a pool of 4 ranks"):
        ranks.run(total, 1, world=5)
    error = ranks.errors(closure_result, world=1)[0]
    assert "local object" in str(error)


def closure_result() -> object:
    return lambda: None


def test_warnings_can_be_errors() -> None:
    with Ranks(size=1, warnings_as_errors=True) as pool:
        (error,) = pool.errors(warn, world=1)
        pid = pool.run(process_id, world=1)[0]
    assert isinstance(error, UserWarning)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_no_rank_outlives_a_killed_test_session(tmp_path: Path) -> None:
    (tmp_path / "sleepers.py").write_text(
        "import os, pathlib, time\n"
        "def sleep(folder):\n"
        "    pathlib.Path(folder, os.environ['RANK']).write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
    )
    script = f"import sleepers, dsx.testing; dsx.testing.Ranks().run(sleepers.sleep, {str(tmp_path)!r}, group=False)"
    search_path = os.pathsep.join([str(tmp_path), *sys.path])
    session = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": search_path})
    try:
        files = [tmp_path / "0", tmp_path / "1"]
        assert eventually(lambda: all(file.exists() and file.read_text() for file in files), within=60)
    finally:
        session.send_signal(signal.SIGKILL)
        session.wait()
    assert eventually(lambda: not any(alive(int(file.read_text())) for file in files), within=5)


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
