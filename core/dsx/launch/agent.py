"""torch's elastic agent, told to run one command as the ranks of this host. Importing it is slow: import it late."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from signal import Signals
from typing import Any, Protocol

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)

from dsx.errors import DsxError
from dsx.launch.blame import Ended
from dsx.launch.config import LaunchConfig
from dsx.launch.meeting import Meeting, meet

__all__ = ["SignalException", "Watcher", "run_agent"]

_LOGGERS = ("torch.distributed.elastic", "torchelastic-events-null")
_REPORT = "dsx/report"
_FAILED = "dsx/failed"
_REPORT_S = 2


class Watcher(Protocol):
    """Who is told of what happens to the ranks of this host."""

    def starting(self, ranks: Sequence[int], world: int, hosts: int) -> None:
        """They are about to be started, as `ranks` of `world` on `hosts` hosts."""

    def failed(self, ended: Mapping[int, Ended], restarts_left: int) -> bool:
        """Some ended with an error; the answer is whether to start all again, if any restarts are left."""

    def report(self, ended: Mapping[int, Ended]) -> str:
        """What all hosts should know of those that ended with an error."""


class _Agent(LocalElasticAgent):
    """torch's agent, with three differences.

    It waits for ranks that do not heed SIGTERM `grace_s` seconds instead of 30. It ends its ranks when another host is
    lost or those there have failed for good, which they may not notice themselves for as long as their collectives
    wait. And it lets hosts tell each other what happened.
    """

    def __init__(self, spec: WorkerSpec, config: LaunchConfig, watcher: Watcher) -> None:
        # No log files of torch's: it opens them in this process and leaves them open. A worker sees to its own.
        logs = DefaultLogsSpecs(os.devnull)
        super().__init__(spec, logs, exit_barrier_timeout=config.timeout_s)
        self._config, self._watcher = config, watcher

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        group: Any = worker_group  # torch declares as None what is set by now
        ranks = [worker.global_rank for worker in group.workers]
        self._watcher.starting(ranks, group.workers[0].world_size, group.group_world_size)
        process_ids: dict[int, Any] = super()._start_workers(worker_group)
        context: Any = self._pcontext
        close = context.close

        def close_soon(death_sig: Signals | None = None, timeout: int = 30) -> None:
            close(death_sig, min(timeout, self._config.grace_s))

        context.close = close_soon
        return process_ids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            if not self._watcher.failed(_ended(result), self._remaining_restarts):
                self._remaining_restarts = 0
            if not self._remaining_restarts:
                self._say_failed(self._watcher.report(_ended(result)))
        elif result.state is WorkerState.HEALTHY and self._another_failed():
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        elif result.state is WorkerState.HEALTHY and self._host_lost():
            return RunResult(WorkerState.FAILED)
        return result

    def _say_failed(self, report: str) -> None:
        """Tell the other hosts, before the ranks that are left here have ended."""
        if self._config.several_hosts:
            # The host of the store may be gone, and with it whoever could be told.
            with suppress(DistError):
                self._shared.set(self._report_key(), report)
                self._shared.set(_FAILED, "1")

    def _another_failed(self) -> bool:
        return self._config.several_hosts and bool(self._shared.check([_FAILED]))

    def _host_lost(self) -> bool:
        """Whether the ranks had better start again without a host that has fallen silent.

        Ranks that wait for its ranks would notice only when their patience is at an end. Only where hosts may be
        missing and a restart is left: a host may be silent and well, and to start again without need costs little.
        """
        if self._config.min_hosts == self._config.max_hosts or not self._remaining_restarts:
            return False
        group: Any = self._worker_group
        handler: Any = group.spec.rdzv_handler
        # torch tells of hosts that come, and not of those that it strikes off.
        lost: bool = len(handler._state_holder.state.participants) < group.group_world_size
        return lost

    @property
    def _shared(self) -> Any:
        """The store of the hosts in this round."""
        return self._worker_group.store

    def _report_key(self, group_rank: int | None = None) -> str:
        return f"{_REPORT}/{self._worker_group.group_rank if group_rank is None else group_rank}"

    def reports(self, own: str) -> Sequence[str]:
        """Every host's report, this one's first; of hosts that are gone, or do not answer within seconds, none."""
        if not self._config.several_hosts:
            return [own]
        group: Any = self._worker_group
        others = [self._report_key(rank) for rank in range(group.group_world_size) if rank != group.group_rank]
        found = [own]
        with suppress(DistError):
            self._shared.set(self._report_key(), own)
            for key in others:
                self._shared.wait([key], timedelta(seconds=_REPORT_S))
                found.append(self._shared.get(key).decode())
        return found


def run_agent(command: Sequence[str], config: LaunchConfig, run_id: str, watcher: Watcher) -> Sequence[str]:
    """Run `command` in the processes of this host to their end.

    Returns nothing if all went well; after a failure, what the watchers of all hosts that can be asked report of it.
    A failure that is not followed by a restart ends all: SIGTERM, then SIGKILL after `grace_s` seconds. The ranks
    inherit this process's streams. Raises SignalException when this process is told to stop, after the ranks have been
    ended; DsxError when the other hosts cannot be reached, or do not come in time.
    """
    with _quiet(), meet(config, run_id) as meeting:
        agent = _Agent(_spec(command, config, meeting), config, watcher)
        with _in_words(config, meeting):
            result: RunResult | None = agent.run()
        # None: the run ended while this host waited for a place in it.
        if result is None or not result.is_failed():
            return ()
        return agent.reports(watcher.report(_ended(result)))


def _spec(command: Sequence[str], config: LaunchConfig, meeting: Meeting) -> WorkerSpec:
    return WorkerSpec(
        role="dsx",
        local_world_size=config.nproc,
        rdzv_handler=meeting.handler,
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=config.max_restarts,
        monitor_interval=0.1,
        local_addr=meeting.address,
    )


def _ended(result: RunResult) -> dict[int, Ended]:
    """The failures that torch's agent found, by rank."""
    return {rank: Ended(_shell_code(failure.exitcode), failure.timestamp) for rank, failure in result.failures.items()}


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


@contextmanager
def _in_words(config: LaunchConfig, meeting: Meeting) -> Iterator[None]:
    """Errors of the meeting of hosts, as the user can mend them."""
    hosts = f"{config.min_hosts}" + (f" to {config.max_hosts}" if config.max_hosts > config.min_hosts else "")
    try:
        yield
    except RendezvousTimeoutError as error:
        raise DsxError(
            f"the hosts of this run did not come together within {config.timeout_s:g} s",
            where=meeting.endpoint,
            expected=f"{hosts} hosts",
            remedy="start `dsx run` on each of them, with the same --rdzv-endpoint and --nnodes",
        ) from error
    except RendezvousClosedError as error:
        raise DsxError(
            "the run has ended on the other hosts",
            where=meeting.endpoint,
            remedy="their output says why; start it on all hosts again",
        ) from error
    except (RendezvousConnectionError, DistError) as error:
        meeting.lost = True
        raise DsxError(
            "the host where this run's hosts meet is gone, or the link to it is; the ranks of this host were ended",
            where=meeting.endpoint,
            remedy="mend the link, then start the run on all hosts again",
        ) from error


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
