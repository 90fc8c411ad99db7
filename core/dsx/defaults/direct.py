"""Ranks of one host read one another's memory: one copy, where a socket makes several and wakes two threads."""

from __future__ import annotations

import ctypes
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from socket import socket
from types import MappingProxyType

import torch
from torch import Tensor

from dsx.defaults.words import Meeting, Words, close

SMALLEST = 1 << 16
"""Bytes below which a message is as fast."""
OFF = "DSX_DIRECT"
"""Environment variable: 0 leaves everything to sockets."""

_PR_SET_PTRACER, _ANY = 0x59616D61, ctypes.c_ulong(-1)


class _Extent(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("size", ctypes.c_size_t))


class Direct:
    """Which ranks' memory this one can read, and reading it: `process_vm_readv(2)`.

    everywhere  whether every rank can read every other's
    words       what those that read one another tell one another, by channel
    """

    def __init__(
        self,
        pids: Sequence[int],
        everywhere: bool,
        smallest: int = SMALLEST,
        words: Mapping[str, Words] = MappingProxyType({}),
    ) -> None:
        self._pids, self.everywhere, self._smallest, self.words = pids, everywhere, smallest, words

    @staticmethod
    def nobody(world: int, channels: Sequence[str]) -> Direct:
        """No rank reads another."""
        return Direct([0] * world, False, words={channel: Words({}, 0) for channel in channels})

    @staticmethod
    def among(
        rank: int, world: int, gather: Callable[[Tensor], Tensor], channels: Sequence[str], timeout_s: float
    ) -> Direct:
        """Find out by trying; entered by all ranks.

        gather     int64 [n] of each rank -> [world, n]
        channels   each has its own words
        timeout_s  seconds that a rank waits for another's words
        """
        word = torch.tensor([secrets.randbits(62)])
        allowed = _allow_reading()
        meeting = Meeting(rank, world * len(channels)) if allowed else None
        words = [os.getpid(), word.data_ptr(), int(word), SMALLEST, meeting.name] if meeting else [0, 0, 0, SMALLEST, 0]
        rows = gather(torch.tensor(words)).tolist()
        found = [bool(pid) and allowed and _holds(pid, address, value) for pid, address, value, *_ in rows]
        lines: dict[int, Sequence[socket]] = {}
        for peer in range(rank + 1, world):
            if meeting and found[peer] and (called := meeting.call(rows[peer][-1], len(channels))):
                lines[peer] = called
            else:
                found[peer] = False
        reads = gather(torch.tensor([*found[:rank], True, *found[rank + 1 :]], dtype=torch.int64)).tolist()
        if meeting:
            lines |= meeting.take([peer for peer in range(rank) if reads[peer][rank]], len(channels))
            meeting.close()
        both = [peer != rank and bool(reads[rank][peer] and reads[peer][rank]) for peer in range(world)]
        for peer in [peer for peer in lines if not both[peer]]:
            close(lines.pop(peer))
        told = {
            channel: Words({peer: each[at] for peer, each in lines.items()}, timeout_s)
            for at, channel in enumerate(channels)
        }
        pids = [row[0] if ok else 0 for row, ok in zip(rows, both, strict=True)]
        return Direct(pids, all(all(row) for row in reads), max(row[3] for row in rows), told)

    def close(self) -> None:
        """Nothing is read or told any more."""
        for words in self.words.values():
            words.close()

    def reaches(self, peer: int, tensor: Tensor) -> bool:
        """Whether a tensor of this size is read from `peer`, and by it; the answer is the same at both ends."""
        return self._pids[peer] != 0 and self.large(tensor.numel() * tensor.element_size())

    def large(self, size: int) -> bool:
        """Whether a message of so many bytes is worth reading."""
        return size >= self._smallest

    def read(self, peer: int, address: int, out: Tensor) -> None:
        """Fill the contiguous `out` from an address in `peer`'s memory."""
        size, done = out.numel() * out.element_size(), 0
        while done < size:
            count = _read(self._pids[peer], address + done, out.data_ptr() + done, size - done)
            if count <= 0:
                reason = os.strerror(ctypes.get_errno())
                raise ConnectionError(
                    f"the memory of rank {peer}, process {self._pids[peer]}, cannot be read: {reason}"
                )
            done += count


def _allow_reading() -> bool:
    """Whether this system has the call and the user wants it. Where only a parent may read its children (Yama's
    ptrace_scope 1), processes of the same user are let read this one."""
    if not sys.platform.startswith("linux") or os.environ.get(OFF) == "0":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "process_vm_readv"):
        return False
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as file:
            restricted = file.read().strip() == "1"
    except OSError:
        restricted = False
    return not restricted or libc.prctl(_PR_SET_PTRACER, _ANY, 0, 0, 0) == 0


def _holds(pid: int, address: int, word: int) -> bool:
    """Whether the process `pid` of this host is the one that has this word at this address."""
    found = torch.zeros(1, dtype=torch.int64)
    return _read(pid, address, found.data_ptr(), 8) == 8 and int(found) == word


def _read(pid: int, address: int, to: int, size: int) -> int:
    """Bytes copied; 0 or less where nothing was."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.process_vm_readv
    call.restype = ctypes.c_ssize_t
    here, there = _Extent(to, size), _Extent(address, size)
    arguments = (ctypes.c_int(pid), ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1))
    return int(call(*arguments, ctypes.c_ulong(0)))
