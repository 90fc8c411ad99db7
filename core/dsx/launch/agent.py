"""torch's elastic agent, told to run one command as the ranks of this host. Importing it is slow: import it late."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from signal import Signals
from typing import Any

from attrs import frozen
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

__all__ = ["Ended", "SignalException", "run_agent"]

_HOST = "localhost"
_LOGGERS = ("torch.distributed.elastic", "torchelastic-events-null")


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

    def __init__(self, spec: WorkerSpec, grace_s: int) -> None:
        # No log files of torch's: it opens them in this process and leaves them open. A worker sees to its own.
        super().__init__(spec, DefaultLogsSpecs(os.devnull))
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


def run_agent(command: Sequence[str], nproc: int, run_id: str, grace_s: int) -> dict[int, Ended]:
    """Run `command` in `nproc` processes to their end; return those that failed, by rank, in the order noticed.

    The first failure ends all: SIGTERM, then SIGKILL after `grace_s` seconds. The ranks inherit this process's streams.
    Raises SignalException when this process is told to stop, after the ranks have been ended.
    """
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
            result = _Agent(spec, grace_s).run()
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
    loggers = [] if "LOGLEVEL" in os.environ else [logging.getLogger(name) for name in _LOGGERS]
    silent = logging.NullHandler()
    for logger in loggers:
        logger.addHandler(silent)
        logger.propagate = False
    try:
        yield
    finally:
        for logger in loggers:
            logger.propagate = True
            logger.removeHandler(silent)
