"""A process of the pool of ranks, seen from the test session, and the two messages that go between them."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import IO

from attrs import define, frozen

_POLL_S = 0.1
_ANSWER_S = 2.0
_OWN_FRAMES = re.compile(r'^  File "(<frozen runpy>|.*[/\\]rank_worker\.py)", line \d+ in .*\n?', re.MULTILINE)


@frozen
class Call:
    """What one rank is asked to run. `arguments` stay pickled until the module that may define them is loaded."""

    module: str
    file: str | None
    function: str
    arguments: bytes
    environment: dict[str, str]
    search_path: tuple[str, ...]
    directory: str
    group: bool
    warnings_as_errors: bool


@frozen
class Outcome:
    """How a call ended on one rank: a pickled `result`, or the pickled `error` with its `report` for the reader.

    died    the process ended under the call: other ranks that lost it may have said so before it was noticed
    """

    time_ns: int
    result: bytes | None = None
    error: bytes | None = None
    report: str = ""
    died: bool = False

    @classmethod
    def of(cls, error: Exception, *, died: bool = False) -> Outcome:
        """The outcome of a rank that cannot speak for itself."""
        return cls(time.time_ns(), error=pickle.dumps(error), report=f"{type(error).__name__}: {error}", died=died)


@define(eq=False)
class Process:
    """A process that runs `dsx.testing.rank_worker`; an empty message says that it awaits a call."""

    popen: subprocess.Popen[bytes]
    connection: Connection
    stacks: IO[bytes]
    idle: bool = False

    @classmethod
    def start(cls) -> Process:
        """Start one; it is ready when `wait_idle` says so, seconds later."""
        ours, theirs = Pipe()
        stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
        handles = (theirs.fileno(), stacks.fileno())
        popen = subprocess.Popen(
            [sys.executable, "-u", "-m", "dsx.testing.rank_worker", *map(str, handles), str(os.getpid())],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
            stdin=subprocess.DEVNULL,
            pass_fds=handles,
        )
        theirs.close()
        return cls(popen, ours, stacks)

    def alive(self) -> bool:
        return self.popen.poll() is None

    def send(self, call: Call | None) -> None:
        """Send a call, or None: all ranks are through, leave the group."""
        self.idle = False
        # A process that died meanwhile is found when its answer is awaited.
        with suppress(OSError):
            self.connection.send_bytes(pickle.dumps(call))

    def receive(self) -> Outcome:
        try:
            outcome: Outcome = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return self.ended()
        return outcome

    def ended(self) -> Outcome:
        return Outcome.of(ChildProcessError(self.ending()), died=True)

    def wait_idle(self, deadline: float) -> bool:
        """Whether it awaits a call by `deadline`, on the monotonic clock."""
        while not self.idle and time.monotonic() < deadline:
            if self.connection.poll(_POLL_S):
                try:
                    self.idle = self.connection.recv_bytes() == b""
                except (EOFError, OSError):
                    return False
            elif not self.alive():
                return False
        return self.idle

    def ending(self) -> str:
        """How the process ended, in words, with the stack that a fatal signal left."""
        try:
            code = self.popen.wait(timeout=_ANSWER_S)
        except subprocess.TimeoutExpired:
            return "the process closed its connection to the test session"
        if code >= 0:
            return f"the process exited with code {code}, without an exception"
        stack = self._written_stack()
        return f"the process was killed by {signal.Signals(-code).name}" + (f" at\n{stack}" if stack else "")

    def ask_stack(self) -> None:
        self.popen.send_signal(signal.SIGUSR1)

    def stack(self) -> str:
        """Where the process was at `ask_stack`, in a reader's form."""
        deadline = time.monotonic() + _ANSWER_S
        size = 0
        while time.monotonic() < deadline:
            time.sleep(_POLL_S / 2)
            before, size = size, os.fstat(self.stacks.fileno()).st_size
            if size and size == before:
                break
        return self._written_stack() or "(no stack: the process did not answer)"

    def kill(self) -> None:
        """End it, if it has not ended, and free what it held here."""
        self.popen.kill()
        self.popen.wait()
        self.connection.close()
        self.stacks.close()

    def _written_stack(self) -> str:
        text = os.pread(self.stacks.fileno(), 1 << 20, 0).decode(errors="replace")
        return _OWN_FRAMES.sub("", text.partition("\nExtension modules:")[0]).rstrip()
