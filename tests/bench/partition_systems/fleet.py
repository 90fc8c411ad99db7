"""The ranks of one system, seen from the driver."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from partition_systems.case import Case
from partition_systems.catalogue import System
from partition_systems.network import Host

BENCH = Path(__file__).parents[1]
ROOT = BENCH.parents[1]
_SOURCES = [str(BENCH), *(str(ROOT / part) for part in ("core", "plugins", "kernels"))]
_END_S = 5.0


class SystemFailed(Exception):
    """A system ended, hung or trained something else; its message says how, in one line."""


@dataclass
class Fleet:
    """Processes, one a rank, stopped unless they have a turn: threads of gloo wake up a hundred times a second.

    folder   of what they write
    started  when the first one was, on the clock that processes share
    """

    folder: Path
    started: float
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    connections: list[Connection] = field(default_factory=list)

    def turn(self, steps: int, timeout_s: float) -> list[dict[str, Any]]:
        """Some steps in a row: the `Turn` of each rank, by rank. Raises SystemFailed."""
        self._signal(signal.SIGCONT)
        try:
            for connection in self.connections:
                connection.send(steps)
        except OSError:
            raise SystemFailed(self.last_words()) from None
        return self.answers(timeout_s)

    def answers(self, timeout_s: float) -> list[dict[str, Any]]:
        """What each rank says next; stops them when all have."""
        said: dict[Connection, dict[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(said) < len(self.connections):
            awaited = [each for each in self.connections if each not in said]
            ready = wait(awaited, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise SystemFailed(f"no answer within {timeout_s:g} s; it last wrote: {self.last_words()}")
            for connection in awaited:
                if connection in ready:
                    said[connection] = self._received(connection)
        self._signal(signal.SIGSTOP)
        return [said[connection] for connection in self.connections]

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(number)

    def _received(self, connection: Connection) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = connection.recv()
        except (EOFError, OSError):
            raise SystemFailed(self.last_words()) from None
        return answer

    def last_words(self) -> str:
        """How each rank ended, if it did, and the last line that it wrote."""
        time.sleep(0.5)  # for the others to end by what ended the first
        words = []
        for rank, process in sorted(enumerate(self.processes), key=lambda each: each[1].poll() is None):
            code = process.poll()
            end = "runs" if code is None else f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            lines = output_of(self.folder, rank).read_text(errors="replace").split("\n")
            said = next((line.strip() for line in reversed(lines) if line.strip()), "")
            words.append(f"rank {rank}, {end}" + (f": {said}" if said else ""))
        return "; ".join(words)

    def close(self) -> None:
        """End every rank, by request and then by force."""
        for connection in self.connections:
            connection.close()
        self._signal(signal.SIGCONT)
        for process in self.processes:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def output_of(folder: Path, rank: int) -> Path:
    """The file for what a rank writes."""
    return folder / f"rank {rank}.txt"


def start(system: System, case: Case, python: str, hosts: Sequence[Host], folder: Path, extra: dict[str, str]) -> Fleet:
    """Start a system's ranks, in turn on each host; what they write goes to `folder`, `extra` to their environment."""
    folder.mkdir(parents=True)
    fleet = Fleet(folder, time.perf_counter())
    for rank in range(case.nproc):
        host = hosts[rank % len(hosts)]
        ours, theirs = Pipe()
        words = {"rank": rank, "store": str(folder / "store"), "system": asdict(system), "case": asdict(case)}
        command = [*host.prefix, python, "-u", "-m", "partition_systems.rank", str(theirs.fileno()), json.dumps(words)]
        with output_of(folder, rank).open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                cwd=folder,
                env=_environment(python, rank, case.nproc, host) | extra,
            )
        theirs.close()
        fleet.processes.append(process)
        fleet.connections.append(ours)
    return fleet


def _environment(python: str, rank: int, world: int, host: Host) -> dict[str, str]:
    """One thread, the network of the host, and the programs and built extensions of the rank's own Python."""
    home = Path(python).parent
    return {
        "TORCH_EXTENSIONS_DIR": str(home.parent / "torch_extensions"),
        **os.environ,
        "PATH": os.pathsep.join([str(home), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join(_SOURCES),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": host.interface,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
