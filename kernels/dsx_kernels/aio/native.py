"""The engine of native.cpp: its threads, and what is under way."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from ctypes import POINTER, byref, c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path
from weakref import WeakSet

from torch import Tensor

from dsx.errors import DsxError, KernelUnavailable
from dsx_kernels import library
from dsx_kernels.aio.faults import fault
from dsx_kernels.library import Function

_PATIENCE_MS = 200
"""After so long a call comes back from native code, for Python to look at signals."""

CLOSING_S = 10.0
"""How long a disk may take to end what is under way when files are closed."""

_log = logging.getLogger("dsx.kernels")

_open = Function("dsx_aio_open", c_void_p, c_void_p, c_void_p, c_int32, c_int64, c_int32, c_int32)
_stop = Function("dsx_aio_stop", c_int32, c_void_p, c_int64)
_free = Function("dsx_aio_free", None, c_void_p)
_submit = Function("dsx_aio_submit", c_int32, c_void_p, c_int32, c_void_p, c_int64, c_int64, c_int64, POINTER(c_void_p))
_wait = Function("dsx_aio_wait", c_int32, c_void_p, c_void_p, c_int64)
_take = Function("dsx_aio_take", c_int32, c_void_p, POINTER(c_int64))
_counts = Function("dsx_aio_counts", None, c_void_p, POINTER(c_int64))
_filesystem = Function("dsx_aio_filesystem", c_int64, c_char_p)


def missing() -> str | None:
    """Why there is no file engine here; None if there is."""
    if reason := library.missing():
        return reason
    try:
        _filesystem(b"/")
    except KernelUnavailable as error:
        return f"{error.what}; {error.remedy}"
    return None


def filesystem(path: Path) -> int:
    """The kind of filesystem at a path, as <linux/magic.h> numbers them; 0 if that is not known."""
    return int(_filesystem(os.fsencode(path)))


class Ticket:
    """A read or write that was asked for. It keeps the tensor alive until that is done; any thread may ask it."""

    def __init__(self, engine: Engine, request: c_void_p, tensor: Tensor, write: bool, offset: int) -> None:
        self._engine, self._request, self._write, self._offset = engine, request, write, offset
        self._tensor: Tensor | None = tensor
        self._failure: tuple[int, int] | None = None
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Return when it is done, as often as one likes.

        `DsxError`, with the file and the byte, if the system refused, the file ended, a checksum differs, or the files
        were closed before.
        """
        while not self.poll(_PATIENCE_MS):
            pass
        if self._failure is not None:
            self._engine.forget(self)
            raise fault(self._engine.paths, self._write, *self._failure)

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self.poll(0)

    def failed(self) -> bool:
        """Whether it is done, and `wait` would raise."""
        return self.done() and self._failure is not None

    def poll(self, milliseconds: int) -> bool:
        """Whether it is done, after waiting for that so long."""
        self._engine.own()
        with self._lock:
            pointer = self._engine.pointer
            if not self._request:
                return True
            if pointer is None:
                self._request, self._failure = c_void_p(), (errno.ECANCELED, self._offset)
                return True
            if not _wait(pointer, self._request, milliseconds):
                return False
            where = c_int64()
            error = int(_take(self._request, byref(where)))
            self._failure = (error, where.value) if error else None
            self._request.value = self._tensor = None
        if not error:
            self._engine.forget(self)
        return True


class Engine:
    """The threads that read and write some open files, which it closes in the end.

    paths        of the files, for messages
    descriptors  of the files; `direct` says of each whether it was opened with O_DIRECT
    size         bytes in all
    threads      for each file
    """

    def __init__(
        self,
        paths: Sequence[Path],
        descriptors: Sequence[int],
        direct: Sequence[bool],
        size: int,
        threads: int,
        checksums: bool,
    ) -> None:
        self.paths, self._descriptors, self._process = tuple(paths), tuple(descriptors), os.getpid()
        numbers = c_int32 * len(self.paths)
        opened = _open(numbers(*descriptors), numbers(*direct), len(self.paths), size, threads, checksums)
        if not opened:
            raise DsxError(
                f"{threads} threads for each of {len(self.paths)} offload files cannot be started",
                remedy="lift the limits on threads and memory of this process, or ask for fewer threads",
            )
        self.pointer: c_void_p | None = c_void_p(opened)
        self._gate = threading.RLock()
        self._flying: dict[Ticket, None] = {}
        self._counted = (0, 0, 0)
        _living.add(self)

    def submit(self, write: bool, tensor: Tensor, offset: int) -> Ticket:
        """Ask for a transfer of all bytes of `tensor`; waits only while 1,024 others are not done."""
        self.own()
        request = c_void_p()
        ticket = Ticket(self, request, tensor, write, offset)
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes == 0:
            return ticket
        self._forget_the_done()
        self._flying[ticket] = None  # before anything is under way: an interrupt may come between any two lines
        error = errno.EAGAIN
        while error == errno.EAGAIN:
            with self._gate:
                error = errno.ECANCELED
                if self.pointer is not None:
                    data = tensor.data_ptr()
                    error = _submit(self.pointer, write, data, nbytes, offset, _PATIENCE_MS, byref(request))
        if error:
            self.forget(ticket)
            raise fault(self.paths, write, error, offset)
        return ticket

    def settle(self) -> None:
        """Wait for all that was asked for. `DsxError` for the first that failed and that nobody waited for."""
        failed = []
        for ticket in tuple(self._flying):
            while not ticket.poll(_PATIENCE_MS):
                pass
            if ticket.failed():
                failed.append(ticket)
        for ticket in failed:
            self.forget(ticket)
        if failed:
            failed[0].wait()

    def forget(self, ticket: Ticket) -> None:
        """Let go of a ticket: it is done, and if it failed, somebody has heard of that."""
        self._flying.pop(ticket, None)

    def _forget_the_done(self) -> None:
        for ticket in tuple(self._flying):
            if not ticket.poll(0):
                return

    def counts(self) -> tuple[int, int, int]:
        """Bytes read, bytes written, requests; the last ones after `close`."""
        self.own()
        with self._gate:
            if self.pointer is not None:
                found = (c_int64 * 3)()
                _counts(self.pointer, found)
                self._counted = found[0], found[1], found[2]
        return self._counted

    def flush(self) -> None:
        """Wait until the disks have what was written."""
        self.own()
        with self._gate:
            if self.pointer is None:
                raise fault(self.paths, True, errno.ECANCELED, 0)
            for descriptor in self._descriptors:
                os.fsync(descriptor)

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, end the threads and close the files.

        If the disk does not answer, threads and files are left as they are, which is logged.
        """
        if self._process != os.getpid():
            return
        with self._gate:
            if self.pointer is None:
                return
            self.counts()
            pointer, deadline = self.pointer, time.monotonic() + CLOSING_S
            while not _stop(pointer, _PATIENCE_MS):
                if time.monotonic() > deadline:
                    self.pointer = None
                    _unanswered.append(self)
                    _log.warning("%s: the disk does not answer; left as it is", self.paths[0].parent)
                    return
            self.counts()
            for ticket in tuple(self._flying):
                ticket.poll(0)
            self._flying.clear()
            self.pointer = None
            _free(pointer)
            for descriptor in self._descriptors:
                os.close(descriptor)

    def own(self) -> None:
        """`DsxError` in a process that was forked from the one whose threads these are."""
        if self._process != os.getpid():
            raise DsxError(
                f"these offload files are those of process {self._process}, from which this one was forked",
                remedy="use them in the process that made them",
            )

    def abandon(self) -> None:
        """Close the files of a process from which this one was forked."""
        if self.pointer is not None:
            self.pointer = None
            for descriptor in self._descriptors:
                os.close(descriptor)


_living: WeakSet[Engine] = WeakSet()
_unanswered: list[Engine] = []
"""Of which a transfer may still end, into a tensor that must be there."""


def _after_fork_in_child() -> None:
    """Threads are not forked, and descriptors would keep files alive that their process has removed."""
    for engine in tuple(_living):
        engine.abandon()
    _living.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
