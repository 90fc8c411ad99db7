"""Work that a device does beside the caller's: streams and events where it has them, nothing where it has none.

Three rules keep it right without a device's help:

1. A side begins each piece of work after everything that the caller's stream was given before: it reads what was
   written there, and may write what is not read there any more.
2. Whoever reads what a side wrote waits for an event of the side's first: a stream by `wait`, a host by `synchronize`.
3. Memory is given back, or filled again, only after the stream that took it has waited for its last reader. An
   allocator lends it on in the order of that stream alone.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Event:
    """A point in what a stream was given. The null part: of a device without streams, where it has always passed."""

    @staticmethod
    def now(device: torch.device) -> Event:
        """After what the caller's stream was given so far."""
        module = _module(device)
        return PASSED if module is None else _record(module, device, module.current_stream(device))

    def wait(self) -> None:
        """What the caller's stream is given from now on begins after it; the caller goes on."""

    def synchronize(self) -> None:
        """Block the caller until it has passed."""


PASSED = Event()
"""Of a device that has nothing to wait for."""


class Side:
    """A stream of its own. The null part: of a device without streams, where all is done in the order of asking.

    The caller's stream is the current one of the thread that calls; several threads may use a side.
    """

    @staticmethod
    def of(device: torch.device) -> Side:
        """A new side of a device."""
        module = _module(device)
        return Side() if module is None else _DeviceSide(module, device)

    def beside(self) -> AbstractContextManager[None]:
        """What is given to the device within is given to the side, after what the caller's stream was given before."""
        return _NOTHING

    def within(self) -> AbstractContextManager[None]:
        """As `beside`, but only after what the side was told to follow: for a thread whose own stream is no matter."""
        return _NOTHING

    def follow(self) -> None:
        """What the side is given from now on begins after what the caller's stream was given so far."""

    def after(self, event: Event) -> None:
        """What the side is given from now on begins after an event."""

    def mark(self) -> Event:
        """After what the side was given so far."""
        return PASSED

    def join(self) -> None:
        """What the caller's stream is given from now on begins after what the side was given so far."""


_NOTHING = nullcontext()


def pinned(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Host memory [size], with any content, between which and `device` copies need not keep a host waiting.

    It may be dropped while such a copy is under way: torch's allocator keeps it until that is done.
    """
    return torch.empty(size, dtype=dtype, pin_memory=_module(device) is not None)


class _DeviceEvent(Event):
    def __init__(self, module: Any, device: torch.device, event: Any) -> None:
        self._module, self._device, self.event = module, device, event

    def wait(self) -> None:
        self.event.wait(self._module.current_stream(self._device))

    def synchronize(self) -> None:
        self.event.synchronize()


class _DeviceSide(Side):
    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device, self._stream = module, device, module.Stream(device)

    def beside(self) -> AbstractContextManager[None]:
        self.follow()
        return self.within()

    def within(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._module.stream(self._stream)
        return context

    def follow(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))

    def after(self, event: Event) -> None:
        if isinstance(event, _DeviceEvent):
            self._stream.wait_event(event.event)

    def mark(self) -> Event:
        return _record(self._module, self._device, self._stream)

    def join(self) -> None:
        self._module.current_stream(self._device).wait_stream(self._stream)


def _record(module: Any, device: torch.device, stream: Any) -> Event:
    event = module.Event()
    event.record(stream)
    return _DeviceEvent(module, device, event)


def _module(device: torch.device) -> Any:
    """torch's module of a device that has streams: torch.cuda, torch.xpu; None of one that has none."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return module if hasattr(module, "Stream") else None
