"""Numbers that ranks of one host tell one another: a socket for each pair, and no thread in between.

By gloo a number costs four messages, each of which wakes a thread of gloo's first; that thread spins while another one
holds the pair's lock, for as long as the system runs something else than that one.
"""

from __future__ import annotations

import secrets
import socket
import struct
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

_NUMBERS = struct.Struct("qq")
_HELLO = struct.Struct("qqq")
_ARRIVAL_S = 60
"""Seconds in which one that has said it is connected is found in the queue."""


class Words:
    """What was told by the ranks of this host that are met on one channel; a number has a tag.

    Any thread may tell, one at a time hears. A rank that has ended is a ConnectionError, one that says nothing for as
    long as a collective may take is a TimeoutError. `close` may be called again; the last reference closes too.
    """

    def __init__(self, lines: Mapping[int, socket.socket], timeout_s: float) -> None:
        self._lines = lines
        self._early: dict[tuple[int, int], int] = {}
        self._timeout_s = timeout_s
        self.close = weakref.finalize(self, close, list(lines.values()))
        wait = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        for line in lines.values():
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, wait)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    def tell(self, peer: int, tag: int, number: int, *, wait: bool = True) -> bool:
        """Tell `peer` an int64. Whether it was told: without `wait` it is not where the peer has much to hear."""
        try:
            self._lines[peer].send(_NUMBERS.pack(tag, number), 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if wait:
                raise self._silent(peer) from None
            return False
        except OSError as error:
            raise self._gone(peer) from error
        return True

    def hear(self, peer: int, tag: int) -> int:
        """Wait for what `peer` tells under this tag."""
        while (number := self._early.pop((peer, tag), None)) is None:
            try:
                word = self._lines[peer].recv(_NUMBERS.size)
            except BlockingIOError:
                raise self._silent(peer) from None
            except OSError as error:
                raise self._gone(peer) from error
            if not word:
                raise self._gone(peer)
            found, value = _NUMBERS.unpack(word)
            self._early[peer, found] = value
        return number

    def _gone(self, peer: int) -> ConnectionError:
        return ConnectionError(f"rank {peer} of this host is gone: it has ended, or has closed its engine")

    def _silent(self, peer: int) -> TimeoutError:
        return TimeoutError(f"rank {peer} of this host has not answered for {self._timeout_s:g} seconds")


class Meeting:
    """Where the ranks of a host connect: a listener under a name that only they know, open while they do."""

    def __init__(self, rank: int, backlog: int) -> None:
        self.name, self._rank = secrets.randbits(62), rank
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_address(self.name))
        self._listener.listen(backlog)
        self._listener.settimeout(_ARRIVAL_S)

    def call(self, name: int, channels: int) -> Sequence[socket.socket] | None:
        """Connect to the rank of this name, once for each channel; None if it is not to be reached."""
        made: list[socket.socket] = []
        try:
            for channel in range(channels):
                made.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                made[-1].setblocking(False)  # a full queue would hold up this rank, and that one waits for it
                made[-1].connect(_address(name))
                made[-1].setblocking(True)
                made[-1].send(_HELLO.pack(name, self._rank, channel))
        except OSError:
            close(made)
            return None
        return made

    def take(self, callers: Sequence[int], channels: int) -> Mapping[int, Sequence[socket.socket]]:
        """The connections of those that have called."""
        came: dict[int, dict[int, socket.socket]] = {caller: {} for caller in callers}
        while any(len(lines) < channels for lines in came.values()):
            line, _ = self._listener.accept()
            hello = line.recv(_HELLO.size)
            name, caller, channel = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (0, -1, 0)
            if name == self.name and caller in came:
                came[caller][channel] = line
            else:
                line.close()  # a stranger's
        return {caller: [lines[channel] for channel in range(channels)] for caller, lines in came.items()}

    def close(self) -> None:
        """Nobody connects any more."""
        self._listener.close()


def close(lines: Sequence[socket.socket]) -> None:
    """Close each, and wake who hears at either end."""
    for line in lines:
        with suppress(OSError):
            line.shutdown(socket.SHUT_RDWR)
        line.close()


def _address(name: int) -> str:
    """In Linux' abstract namespace: no file, gone with the listener."""
    return f"\0dsx-{name:016x}"
