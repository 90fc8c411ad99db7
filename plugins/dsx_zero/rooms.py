"""Memory that comes and goes behind a fixed address."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import cast

import torch
from torch import Tensor


class Room(ABC):
    """The memory of one buffer, whose tensors stay what they are while it is there and while it is not."""

    @abstractmethod
    def fill(self) -> None:
        """Put memory behind it, with any content; nothing if there is."""

    @abstractmethod
    def empty(self) -> None:
        """Take the memory away."""

    @abstractmethod
    def bytes(self) -> int:
        """Bytes that it holds now."""


class Resized(Room):
    """By torch's allocator: the storage is resized."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage, self._size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()

    def fill(self) -> None:
        if self._storage.nbytes() != self._size:  # torch would move it to another address all the same
            self._storage.resize_(self._size)

    def empty(self) -> None:
        self._storage.resize_(0)

    def bytes(self) -> int:
        return self._storage.nbytes()


_HUGE = 2 << 20
"""Bytes at whose multiples the kernel moves whole tables of pages, not page by page."""

_NONE, _READ_WRITE = 0, 3
_PRIVATE_ANONYMOUS_NORESERVE = 0x4022
_MAYMOVE_FIXED_DONTUNMAP = 7
_FAILED = ctypes.c_void_p(-1).value


class Pool:
    """Pages that rooms of one size hand on to one another.

    A heap would be left with holes by buffers that come and go between activations, or give them back to the kernel,
    which clears every page that it hands out again, at 1.5 GB/s.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[int]] = {}
        self._all: list[tuple[int, int]] = []

    def take(self, size: int) -> int:
        """The address of pages that nobody uses."""
        free = self._free.get(size)
        if free:
            return free.pop()
        address = _reserve(size, _READ_WRITE)
        self._all.append((address, size))
        return address

    def give(self, size: int, address: int) -> None:
        """Nobody uses the pages at this address."""
        self._free.setdefault(size, []).append(address)

    def __del__(self) -> None:
        for address, size in self._all:
            _call("munmap", address, size)


class Mapped(Room):
    """By pages of a pool, which are moved to where the buffer is and back, by mremap(2). Without them the address
    cannot be read at all."""

    def __init__(self, pool: Pool, size: int) -> None:
        grain = _HUGE if size >= _HUGE else mmap.PAGESIZE
        self._pool, self._size, self._home = pool, -(-size // grain) * grain, 0
        self._count = size
        self._address = _reserve(self._size, _NONE)

    def tensor(self, size: int, dtype: torch.dtype) -> Tensor:
        """The buffer [size]; the address is its own as long as a tensor refers to it."""
        memory = (ctypes.c_char * (size * dtype.itemsize)).from_address(self._address)
        weakref.finalize(memory, _call, "munmap", self._address, self._size)
        return torch.frombuffer(memory, dtype=dtype)

    def fill(self) -> None:
        if not self._home:
            self._home = self._pool.take(self._size)
            _move(self._home, self._address, self._size)

    def empty(self) -> None:
        if self._home:
            _move(self._address, self._home, self._size)
            _call("mprotect", self._address, self._size, _NONE)
            self._pool.give(self._size, self._home)
            self._home = 0

    def bytes(self) -> int:
        return self._count if self._home else 0  # what is beyond it is never touched


def _reserve(size: int, protection: int) -> int:
    """An address at a multiple of `_HUGE` that is nobody else's."""
    start = _call("mmap", 0, size + _HUGE, protection, _PRIVATE_ANONYMOUS_NORESERVE, -1, 0)
    address = -(-start // _HUGE) * _HUGE
    if address > start:
        _call("munmap", start, address - start)
    if start + _HUGE > address:
        _call("munmap", address + size, start + _HUGE - address)
    return address


def _move(source: int, target: int, size: int) -> None:
    """Move pages; the source stays reserved, without any."""
    _call("mremap", source, size, size, _MAYMOVE_FIXED_DONTUNMAP, target)


@cache
def _function(name: str) -> Callable[..., int | None]:
    """A function of libc's. A library opened anew for every call is a cycle of classes that stays until the collector
    comes by, amid activations that come and go."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_void_p
    return cast(Callable[..., "int | None"], function)


def _call(name: str, *arguments: int) -> int:
    """A call of libc's that returns an address, or -1 and an error."""
    found = _function(name)(*(ctypes.c_long(argument) for argument in arguments))
    if found == _FAILED:
        raise MemoryError(f"{name} of {arguments[1]} bytes failed: {os.strerror(ctypes.get_errno())}")
    return found or 0


@cache
def mappable(device: torch.device) -> bool:
    """Whether buffers on this device can be moved: on Linux 5.7 and later."""
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return False
    reserved: list[int] = []
    try:
        for protection in (_READ_WRITE, _NONE):
            reserved.append(_reserve(_HUGE, protection))
        _move(reserved[0], reserved[1], _HUGE)
    except MemoryError:
        return False
    finally:
        for address in reserved:
            _call("munmap", address, _HUGE)
    return True
