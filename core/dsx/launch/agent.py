"""torch's elastic agent, told to run one command as the ranks of this host. Importing it is slow: import it late."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import Signals
from typing import Any

from attrs import frozen
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

__all__ = ["Ended", "SignalException", "run_agent"]

_HOST = "localhost"


@frozen
class Ended:
    """A rank that ended with an error, as its parent saw it.

    exit_code  as a shell has it: 128 + n for signal n
    time_s     when that was noticed, in whole seconds since the epoch
    """

    exit_code: int
    time_s: int


class _Agent(LocalElasticAgent):
    """torch's agent waits 30 s for ranks that do not heed SIGTERM once one has failed; this one waits `grace_s`."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, grace_s: int) -> None:
        super().__init__(spec, logs)
        self._grace_s = grace_s

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        process_ids: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert context is not None
        close = context.close

        def close_soon(death_sig: Signals | None = None, timeout: int = 30) -> None:
            close(death_sig, min(timeout, self._grace_s))

        context.close = close_soon  # type: ignore[method-assign]
        return process_ids


def run_agent(command: Sequence[str], nproc: int, log_dir: Path, run_id: str, grace_s: int) -> dict[int, Ended]:
    """Run `command` in `nproc` processes to their end; return those that failed, by rank, in the order noticed.

    The first failure ends all: SIGTERM, then SIGKILL after `grace_s` seconds. Rank 0 has this process's own stdout and
    stderr; the others write to `log_dir/RUN_ID_*/attempt_0/RANK/`. Raises SignalException when this process is told to
    stop, after the ranks have been ended.
    """
    logs = DefaultLogsSpecs(str(log_dir), redirects={rank: Std.ALL for rank in range(1, nproc)})
    rendezvous = get_rendezvous_handler(
        RendezvousParameters("c10d", f"{_HOST}:0", run_id, min_nodes=1, max_nodes=1, local_addr=_HOST)
    )
    spec = WorkerSpec(
        role="dsx",
        local_world_size=nproc,
        rdzv_handler=rendezvous,
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=0,
        monitor_interval=0.1,
        local_addr=_HOST,
    )
    with _quiet():
        try:
            result = _Agent(spec, logs, grace_s).run()
        finally:
            rendezvous.shutdown()
    return {
        rank: Ended(_shell_code(failure.exitcode), failure.timestamp)
        for rank, failure in (result.failures.items() if result.is_failed() else ())
    }


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the agent's account of ended processes from the terminal, unless LOGLEVEL is set: dsx gives its own."""
    logger = logging.getLogger("torch.distributed.elastic")
    before, silent = logger.propagate, logging.NullHandler()
    logger.propagate = "LOGLEVEL" in os.environ
    logger.addHandler(silent)
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silent)
