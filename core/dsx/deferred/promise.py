"""Memory that is not there yet, and the operations that will fill it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

_numbers = count()


@define(eq=False)
class Promise:
    """The memory of a storage on the meta device.

    device  on which it was asked for; meta: nobody knows its values
    size    bytes
    steps   what made or changed it, in order
    """

    device: torch.device
    size: int
    steps: list[Step] = field(factory=list)


@frozen(eq=False)
class View:
    """A tensor as it was at some time: a window onto promised memory, after so many of its steps."""

    promise: Promise
    after: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        """The view that a tensor on the meta device is now."""
        promise = promised(tensor)
        return cls(
            promise,
            len(promise.steps),
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def covers(self) -> bool:
        """Whether every byte of the memory belongs to an element, and to one only."""
        extent = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size != 1:
                if stride != extent:
                    return False
                extent *= size
        return extent * self.dtype.itemsize == self.promise.size

    def on(self, memory: Tensor) -> Tensor:
        """The tensor, in memory that is there: uint8 [bytes]."""
        tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
        start = memory.storage_offset() // self.dtype.itemsize
        tensor.set_(memory.untyped_storage(), start + self.offset, self.size, self.stride)
        tensor = torch._conj(tensor) if self.conjugated else tensor
        return torch._neg_view(tensor) if self.negated else tensor


@frozen(eq=False)
class Draw:
    """From where an operation takes its random numbers.

    state     of the generator, before
    explicit  whether a generator was given to it; else it is the device's own
    """

    device: torch.device
    state: Tensor
    explicit: bool


@frozen(eq=False)
class Step:
    """An operation that makes or changes memory.

    args, kwargs  with views in place of tensors without memory, and `Given` in place of real ones
    default       dtype of tensors for which none is said
    made          for each tensor of its result: the view of memory that it makes, None for memory that was there
    fills         the memory of which it overwrites every byte, without reading it: that of its first argument
    number        later steps have higher ones
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    default: torch.dtype
    draw: Draw | None = None
    fills: Promise | None = None
    made: list[View | None] = field(factory=list)
    number: int = field(factory=lambda: next(_numbers))


_KEPT_BYTES = 1 << 16
"""Real tensors up to this size are copied; larger ones, those mapped from files among them, must stay as they are."""


class Given:
    """A real tensor among the arguments of a step."""

    def __init__(self, tensor: Tensor) -> None:
        small = tensor.numel() * tensor.element_size() <= _KEPT_BYTES
        self.tensor = tensor.detach().clone() if small else tensor
        self._version = _version(self.tensor)

    @property
    def changed(self) -> bool:
        """Whether it was written since."""
        return _version(self.tensor) != self._version


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def promise_of(tensor: Tensor) -> Promise | None:
    """What is known of the memory of a tensor on the meta device; None for a tensor made outside `empty_init`."""
    found: Promise | None = getattr(tensor.untyped_storage(), "dsx_promise", None)
    return found


def promise(storage: torch.UntypedStorage, device: torch.device) -> Promise:
    """Promise the memory of a storage. It is kept by the storage, so that both go together."""
    made = storage.dsx_promise = Promise(device, storage.nbytes())  # type: ignore[attr-defined]
    return made


def promised(tensor: Tensor) -> Promise:
    """As `promise_of`; what is not known is known from now on not to be."""
    return promise_of(tensor) or promise(tensor.untyped_storage(), tensor.device)


def asked_device(tensor: Tensor) -> torch.device:
    """The device that a tensor was asked for: meta where it was none, or is not known."""
    if not tensor.is_meta:
        return tensor.device
    known = promise_of(tensor)
    return tensor.device if known is None else known.device
