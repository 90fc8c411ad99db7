"""Run a function as the ranks of this host, and say which rank failed first, why, and with what exit code."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from attrs import frozen

from dsx.errors import DsxError, RankFailed
from dsx.launch.worker import CALL_FILE, FAILURE_FILE, LAUNCH_DIRECTORY, LAUNCHER

if TYPE_CHECKING:
    from dsx.launch.agent import Ended

_TAIL_CHARACTERS = 4000
_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


@frozen(kw_only=True)
class LaunchConfig:
    """How ranks are started.

    nproc    ranks on this host
    log_dir  where a folder is made for the launch, with each rank's failure and the output of ranks other than 0;
             None: a temporary one, kept only after a failure
    grace_s  seconds from SIGTERM to SIGKILL for ranks that are told to end; at least 3, by which the launcher knows a
             rank that the agent killed from one that died first
    """

    nproc: int
    log_dir: Path | None = None
    grace_s: int = 3


@frozen
class Failure:
    """What a failing rank wrote: `error` is for the user as it stands, `traceback` is an exception's."""

    rank: int
    code: int
    time_ns: int
    error: str | None = None
    traceback: str | None = None


def launch(target: str, arguments: Mapping[str, Any], nproc: int, log_dir: Path | None = None) -> int:
    """Call `target`, "module:function", as `function(**arguments)` in `nproc` processes that can form a process group.

    `arguments` must be JSON. Each process has the environment of a rank (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT), and, unless OMP_NUM_THREADS is set, its share of the cores for torch's threads. Rank 0 has the stdout
    and stderr of this process; those of the others go to files in `log_dir`.

    Returns 0, or 128 + n after this process was told to stop by signal n. Raises RankFailed, naming the rank that
    failed first, when one ends with an error; all others are ended within seconds.
    """
    return launch_with(LaunchConfig(nproc=nproc, log_dir=log_dir), target, arguments)


def launch_with(config: LaunchConfig, target: str, arguments: Mapping[str, Any]) -> int:
    """`launch`, with every setting."""
    call = _call(target, arguments, config.nproc)
    directory = _launch_directory(config.log_dir)
    (directory / CALL_FILE).write_text(call)
    code, error = _run(config, directory)
    # An error that names no place in the folder has said all there is to say.
    if config.log_dir is None and (error is None or error.where is None):
        shutil.rmtree(directory, ignore_errors=True)
    if error is not None:
        raise error
    return code


def _launch_directory(log_dir: Path | None) -> Path:
    """A new folder, for this launch alone."""
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="launch_" if log_dir is not None else "dsx_launch_", dir=log_dir)).absolute()


def _run(config: LaunchConfig, directory: Path) -> tuple[int, RankFailed | None]:
    from dsx.launch.agent import SignalException, run_agent

    command = (sys.executable, "-u", "-m", "dsx.launch.worker")
    try:
        with _environment(config.nproc, directory), _signal_handlers():
            ended = run_agent(command, config.nproc, directory.name, config.grace_s)
    except SignalException as stop:
        return 128 + stop.sigval, None
    if not ended:
        return 0, None
    return 1, _rank_failed(ended, _failures(directory), directory)


def _call(target: str, arguments: Mapping[str, Any], nproc: int) -> str:
    if nproc < 1:
        raise DsxError("the number of ranks must be at least 1", where="nproc", found=str(nproc))
    module, _, function = target.partition(":")
    if not (module and function):
        raise DsxError("the target of a launch must be module:function", found=repr(target))
    try:
        return json.dumps(
            {
                "target": target,
                "arguments": dict(arguments),
                "search_path": sys.path,
                "PYTHONPATH": os.environ.get("PYTHONPATH"),
            }
        )
    except (TypeError, ValueError) as error:
        raise DsxError(
            f"the arguments of {target} cannot be sent to its ranks",
            found=str(error),
            remedy="pass only what JSON has: strings, numbers, booleans, null, lists and string-keyed mappings",
        ) from error


@contextmanager
def _environment(nproc: int, directory: Path) -> Iterator[None]:
    """What the ranks inherit, for as long as they are being started."""
    added = {
        LAUNCH_DIRECTORY: str(directory),
        LAUNCHER: str(os.getpid()),
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
    }
    if "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(max(1, _cores() // nproc))
    before = {name: os.environ.get(name) for name in (*added, "TORCHELASTIC_SIGNALS_TO_HANDLE")}
    os.environ.update(added)
    os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Undo the agent's own handlers, which it leaves behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = [(number, signal.getsignal(number)) for number in _AGENT_SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _failures(directory: Path) -> dict[int, Failure]:
    failures = [Failure(**json.loads(file.read_text())) for file in directory.glob(f"*/{FAILURE_FILE}")]
    return {failure.rank: failure for failure in failures}


def blamed(ended: Mapping[int, Ended], failures: Mapping[int, Failure]) -> int:
    """The rank that failed first.

    A rank that died without a word (killed, or gone through os._exit) comes before ranks that tell of an error, which
    may be its loss; not so one ended by SIGTERM, or much later by SIGKILL: that was the agent.
    """
    first_word_s = min((failure.time_ns / 1e9 for failure in failures.values()), default=float("inf"))
    silent = [
        rank
        for rank, end in ended.items()
        if rank not in failures and end.exit_code != 128 + signal.SIGTERM and end.time_s <= first_word_s + 2
    ]
    if silent:
        return min(silent, key=lambda rank: ended[rank].time_s)
    return min(failures or ended, key=lambda rank: failures[rank].time_ns if failures else ended[rank].time_s)


def _rank_failed(ended: Mapping[int, Ended], failures: Mapping[int, Failure], directory: Path) -> RankFailed:
    rank = blamed(ended, failures)
    failure = failures.get(rank)
    if failure is not None and failure.error is not None:
        same = [other for other, its in sorted(failures.items()) if its.error == failure.error]
        who = f"rank {rank}" if len(same) == 1 else f"ranks {', '.join(map(str, same))}"
        return RankFailed(f"{who}: {failure.error}", rank=rank, exit_code=failure.code)
    code = failure.code if failure is not None else ended[rank].exit_code
    told = [failure.traceback if failure is not None else None, _tail(directory / str(rank) / "stderr.log")]
    return RankFailed(
        f"rank {rank} {_ending(code, failure)}",
        rank=rank,
        exit_code=code,
        where=str(directory / str(rank)),
        found="".join("\n" + indent(text.rstrip(), "    ") for text in told if text) or None,
    )


def _ending(code: int, failure: Failure | None) -> str:
    if failure is not None:
        return f"failed with exit code {code}"
    if code > 128:
        try:
            return f"was killed by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"ended with exit code {code}, without an exception"


def _tail(file: Path) -> str:
    """The end of what a rank wrote, where that did not go to the terminal."""
    return file.read_text(errors="replace")[-_TAIL_CHARACTERS:].strip() if file.exists() else ""
