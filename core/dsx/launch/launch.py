"""Run a function as the ranks of this host, alone or among several, and say which rank failed first and why."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from attrs import define, field

from dsx.errors import DsxError
from dsx.host import cores, memory_kills
from dsx.launch.blame import Ended, Losses, rank_failed
from dsx.launch.config import LaunchConfig, exchange_s
from dsx.launch.distributed import TIMEOUT
from dsx.launch.worker import CALL_FILE, HEEDS_FILE, LAUNCHER, RESULT_FILE, ROUND, STOP_FILE, rank_folder

_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_AGENT_SIGNALS = "SIGHUP,SIGQUIT"
_MISUSE = 2


def launch(target: str, arguments: Mapping[str, Any], nproc: int, log_dir: Path | None = None) -> int:
    """Call `target`, "module:function", as `function(**arguments)` in `nproc` processes that can form a process group.

    `arguments` must be JSON. Each process has the environment of a rank (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
    MASTER_PORT), and, unless OMP_NUM_THREADS is set, its share of the cores for torch's threads. The first rank of a
    host has the stdout and stderr of this process; those of the others go to files in `log_dir`.

    Returns 0, or what a rank's function returned if that was another number; 128 + n after this process was told to
    stop by signal n: ranks that heed `dsx.launch.stop` end by themselves, those that do not, or a second signal, are
    ended at once. Raises RankFailed, naming the rank that failed first, when one ends with an error; all others, on
    all hosts, are ended within seconds.
    """
    return launch_with(LaunchConfig(nproc=nproc, log_dir=log_dir), target, arguments)


def launch_with(config: LaunchConfig, target: str, arguments: Mapping[str, Any]) -> int:
    """`launch`, with every setting."""
    call = _call(target, arguments)
    directory = _launch_directory(config.log_dir)
    (directory / CALL_FILE).write_text(call)
    kept = config.log_dir is not None
    try:
        return _run(config, directory)
    except DsxError as error:
        # An error that names no place in the folder has said all there is to say.
        kept = kept or str(directory) in (error.where or "")
        raise
    finally:
        if not kept:
            shutil.rmtree(directory, ignore_errors=True)


def _launch_directory(log_dir: Path | None) -> Path:
    """A new folder, for this launch alone."""
    if log_dir is not None:
        log_dir.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix="launch_" if log_dir is not None else "dsx_launch_", dir=log_dir)).absolute()


def _run(config: LaunchConfig, directory: Path) -> int:
    from dsx.launch.agent import SignalException, run_agent

    command = (sys.executable, "-u", "-m", "dsx.launch.worker")
    watch = _Watch(directory, config, SignalException)
    try:
        with _environment(config), watch.signals():
            # All hosts of a run must name it alike; an endpoint serves one run.
            reports = run_agent(command, config, "dsx" if config.several_hosts else directory.name, watch)
    except SignalException as end:
        return 128 + (watch.stopped_by or end.sigval)
    if not reports:
        return watch.result()
    losses = Losses.merged(reports)
    if not losses:
        raise DsxError(
            "the run failed on another host, which does not answer any more; the ranks of this one were ended",
            where=config.endpoint,
            remedy="the output of the other hosts says why",
        )
    raise rank_failed(losses)


@define
class _Watch:
    """Sees to the ranks of this host while they run: their folders, their failures, and signals to this process.

    directory   of the launch
    end         raised to end all ranks at once
    round       how often ranks have been started
    ranks       those of this host, in this round
    kills       for want of memory, before this round
    stopped_by  the number of the signal that asked the run to stop, or 0
    """

    directory: Path
    config: LaunchConfig
    end: type[BaseException]
    round: int = 0
    ranks: Sequence[int] = field(factory=tuple)
    kills: int = 0
    stopped_by: int = 0

    @property
    def folder(self) -> Path:
        """Of the ranks in this round."""
        return self.directory / f"round_{self.round}"

    def starting(self, ranks: Sequence[int], world: int, hosts: int) -> None:
        self.round, self.ranks = self.round + 1, ranks
        self.kills = memory_kills()
        os.environ[ROUND] = str(self.folder)
        if self.round > 1:
            _say(f"all ranks start again: {world} on {hosts} host{'s' if hosts > 1 else ''}")

    def failed(self, ended: Mapping[int, Ended], restarts_left: int) -> bool:
        losses = self._losses(ended)
        # Misuse stays misuse.
        if not restarts_left or any(failure.code == _MISUSE for failure in losses.failures.values()):
            return False
        _say(f"{rank_failed(losses)}\n{restarts_left} of {self.config.max_restarts} restarts left")
        return True

    def report(self, ended: Mapping[int, Ended]) -> str:
        return self._losses(ended).to_json()

    def _losses(self, ended: Mapping[int, Ended]) -> Losses:
        host = socket.gethostname() if self.config.several_hosts else ""
        return Losses.of(ended, self.folder, host, starved=memory_kills() > self.kills)

    def result(self) -> int:
        """The exit code after ranks that all ended well."""
        results = [int(file.read_text()) for file in self.folder.glob(f"*/{RESULT_FILE}")]
        return next(iter(results), 0) or (128 + self.stopped_by if self.stopped_by else 0)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Let SIGTERM and SIGINT stop the run, and undo the agent's own handlers, which it leaves behind."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = [(number, signal.getsignal(number)) for number in _HANDLED]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        try:
            yield
        finally:
            for number, handler in before:
                signal.signal(number, handler)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        heeding = [(rank_folder(self.folder, rank) / HEEDS_FILE).exists() for rank in self.ranks]
        at_once = bool(self.stopped_by) or not (heeding and all(heeding))
        self.stopped_by = self.stopped_by or number
        if at_once:
            # SIGTERM whatever came: ranks do not heed Ctrl-C.
            raise self.end(f"stopped by signal {number}", signal.SIGTERM)
        partial = self.directory / f"{STOP_FILE}.partial"
        partial.write_text(str(number))
        partial.replace(self.directory / STOP_FILE)
        name = signal.Signals(number).name
        os.write(2, f"{name}: the ranks finish their step and stop; a second signal ends them at once\n".encode())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _call(target: str, arguments: Mapping[str, Any]) -> str:
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
def _environment(config: LaunchConfig) -> Iterator[None]:
    """What the agent heeds and the ranks inherit, for as long as they are being started."""
    added = {
        LAUNCHER: str(os.getpid()),
        TIMEOUT: f"{exchange_s(config.timeout_s):g}",
        "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": _AGENT_SIGNALS,
    }
    if config.several_hosts:
        # Rank 0 may come to be on another host, and a store shared by all rounds names its keys by a count of restarts
        # that differs between hosts.
        added["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if "OMP_NUM_THREADS" not in os.environ:
        added["OMP_NUM_THREADS"] = str(max(1, cores() // config.nproc))
    before = {name: os.environ.get(name) for name in (*added, ROUND)}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
