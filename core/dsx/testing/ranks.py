"""A pool of gloo ranks that run functions of test modules, started once and used by many tests.

    def total(value):
        tensor = torch.tensor([value + dist.get_rank()])
        dist.all_reduce(tensor)
        return tensor.item()

    def test_total(ranks):
        assert ranks.run(total, 1, world=2) == [3, 3]

Every call gets a default process group of its own, of exactly `world` ranks, the working directory, environment and
import path of the test, and fresh seeds. The processes are reused, so a call costs some 30 ms; those that hang or die
are replaced.
What ranks print comes out where the test session's own output goes.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve

from dsx.testing.rank_process import Call, Outcome, Process

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_HOST = "127.0.0.1"
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_START_S = 120.0
_POLL_S = 0.1

T = TypeVar("T")


class RanksError(AssertionError):
    """Some ranks failed; the message has each one's traceback, the rank that failed first at the top.

    errors    the exception of each rank, by rank; None for those that did not fail
    """

    def __init__(self, message: str, errors: tuple[BaseException | None, ...]) -> None:
        super().__init__(message)
        self.errors = errors

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (str(self), self.errors)


class Ranks:
    """Up to `size` processes, started on demand, that act as the ranks of a gloo group on this host.

    size                the largest world a call may ask for
    grace_s             seconds that the other ranks get to end by themselves once one has failed
    warnings_as_errors  a Python warning inside a call raises
    """

    def __init__(self, size: int = 4, *, grace_s: float = 2.0, warnings_as_errors: bool = False) -> None:
        self._size = size
        self._grace_s = grace_s
        self._warnings_as_errors = warnings_as_errors
        self._processes: list[Process] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., T],
        *args: Any,
        world: int = 2,
        timeout: float = 60,
        group: bool = True,
        **kwargs: Any,
    ) -> list[T]:
        """Call `function(*args, **kwargs)` on `world` ranks and return what it returned on each, by rank.

        `function` is a top-level function of a module or test module; arguments and results must pickle. `timeout` is
        in seconds, from the moment all ranks are ready. With `group=False` no process group is made, so that `function`
        can make it from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...), once, as under a launcher.

        Raises RanksError, with every failing rank's traceback, if a rank raises, dies, or is still running at the end;
        TypeError for a function or an argument that cannot travel.
        """
        __tracebackhide__ = True
        outcomes = self._call(function, args, kwargs, world, timeout, group)
        if any(outcome.error for outcome in outcomes):
            raise _failure(f"{function.__module__}.{function.__qualname__}", outcomes)
        return [pickle.loads(outcome.result) for outcome in outcomes if outcome.result is not None]

    def errors(
        self,
        function: Callable[..., object],
        *args: Any,
        world: int = 2,
        timeout: float = 60,
        group: bool = True,
        **kwargs: Any,
    ) -> list[BaseException | None]:
        """Call as `run` does and return the exception that each rank raised, or None, by rank.

        An exception that does not pickle comes as a RuntimeError with its text, a rank that died as a
        ChildProcessError, and a rank that had to be stopped as a TimeoutError.
        """
        __tracebackhide__ = True
        return [_error(outcome) for outcome in self._call(function, args, kwargs, world, timeout, group)]

    def close(self) -> None:
        """End every process of the pool. A later call starts new ones."""
        for process in self._processes:
            process.kill()
        self._processes.clear()

    def _call(
        self,
        function: Callable[..., object],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        world: int,
        timeout: float,
        group: bool,
    ) -> list[Outcome]:
        __tracebackhide__ = True
        if not 1 <= world <= self._size:
            raise ValueError(f"world={world} does not fit a pool of {self._size} ranks: see Ranks(size=...)")
        module, file = _origin(function)
        call = Call(
            module=module,
            file=file,
            function=function.__qualname__,
            arguments=_pickled(function, args, kwargs),
            environment={},
            search_path=tuple(sys.path),
            directory=os.getcwd(),
            group=group,
            warnings_as_errors=self._warnings_as_errors,
        )
        processes = self._ready(world)
        # A store of its own, held to the end of the call, keeps the keys of one call from another's.
        store = _store()
        try:
            for rank, process in enumerate(processes):
                process.send(evolve(call, environment=dict(os.environ) | _rank_environment(rank, world, store.port)))
            return self._outcomes(processes, timeout)
        except BaseException:
            for process in processes:
                process.kill()
            raise

    def _ready(self, world: int) -> list[Process]:
        """The first `world` processes, alive and awaiting a call."""
        for process in [process for process in self._processes if not process.alive()]:
            process.kill()
            self._processes.remove(process)
        while len(self._processes) < world:
            self._processes.append(Process.start())
        deadline = time.monotonic() + _START_S
        for process in self._processes[:world]:
            if not process.wait_idle(deadline):
                how = "it took too long" if process.alive() else process.ending()
                process.kill()
                raise RuntimeError(f"a process of the pool of ranks did not start: {how}; see what it printed")
        return self._processes[:world]

    def _outcomes(self, processes: list[Process], timeout: float) -> list[Outcome]:
        """Wait for every rank, stop those that are late, and leave only processes that are fit for the next call."""
        outcomes: dict[int, Outcome] = {}
        pending = dict(enumerate(processes))
        late = f"was still running after {timeout:g} s"
        deadline = time.monotonic() + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            for rank, outcome in _arrived(pending, min(left, _POLL_S)).items():
                del pending[rank]
                outcomes[rank] = outcome
                if outcome.error and time.monotonic() + self._grace_s < deadline:
                    deadline = time.monotonic() + self._grace_s
                    late = f"was still running {self._grace_s:g} s after rank {rank} had failed"
        outcomes |= _stopped(pending, late)
        self._finish([process for process in processes if process.alive()])
        return [outcomes[rank] for rank in range(len(processes))]

    def _finish(self, processes: list[Process]) -> None:
        """Let the ranks leave their group, which must not happen while another one may still be talking to them."""
        for process in processes:
            process.send(None)
        deadline = time.monotonic() + self._grace_s
        for process in processes:
            if not process.wait_idle(deadline):
                process.kill()


def _arrived(processes: dict[int, Process], timeout: float) -> dict[int, Outcome]:
    """The outcomes, by rank, that are there within `timeout` seconds; possibly none."""
    # A dead rank whose own children hold its connection open sends no end of file: so look at the processes too.
    dead = {rank for rank, process in processes.items() if not process.alive()}
    arrived = wait([process.connection for process in processes.values()], timeout=0 if dead else timeout)
    return {
        rank: process.receive() if process.connection in arrived else process.ended()
        for rank, process in processes.items()
        if process.connection in arrived or rank in dead
    }


def _stopped(processes: dict[int, Process], late: str) -> dict[int, Outcome]:
    """The outcomes of ranks that have to be killed: where each one is."""
    for process in processes.values():
        process.ask_stack()
    outcomes = {
        rank: Outcome.of(TimeoutError(f"rank {rank} {late}; it was at\n{process.stack()}"))
        for rank, process in processes.items()
    }
    for process in processes.values():
        process.kill()
    return outcomes


def _store() -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)


def _rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What a launcher sets. As under torch's agent, every rank is a client of a store that the parent serves."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": _LOOPBACK,
    }


def _error(outcome: Outcome) -> BaseException | None:
    if outcome.error is None:
        return None
    error: BaseException = pickle.loads(outcome.error)
    return error


def _failure(name: str, outcomes: list[Outcome]) -> RanksError:
    failed = sorted(
        (rank for rank, outcome in enumerate(outcomes) if outcome.error),
        key=lambda rank: (not outcomes[rank].died, outcomes[rank].time_ns),
    )
    first = outcomes[failed[0]]
    lines = [f"{name}: {len(failed)} of {len(outcomes)} ranks failed, rank {failed[0]} first"]
    for rank in failed:
        later = max(0, outcomes[rank].time_ns - first.time_ns) / 1e9
        lines += ["", f"[rank {rank}]" if outcomes[rank] is first else f"[rank {rank}, {later:.3f} s later]"]
        lines.append(outcomes[rank].report.rstrip())
    return RanksError("\n".join(lines), tuple(_error(outcome) for outcome in outcomes))


def _origin(function: Callable[..., object]) -> tuple[str, str | None]:
    """Module and file where another process finds `function`."""
    name, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if name is None or qualname is None:
        raise TypeError(f"{function!r} cannot run on ranks: pass a module's top-level function and its arguments apart")
    module = sys.modules.get(name)
    found: object = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if name == "__main__" or found is not function:
        why = "it lives in __main__" if name == "__main__" else "its module does not have it under that name"
        raise TypeError(
            f"{name}.{qualname} cannot run on ranks, which import it by name: {why}.\n"
            "Move it to the top level of a module (no closure, no lambda) and pass what it needs as arguments."
        )
    return name, getattr(module, "__file__", None)


def _pickled(function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(f"the arguments of {function.__qualname__} cannot be sent to ranks: {error}") from error
