"""A device whose streams are records of what happens before what: finds reads and writes that nothing keeps apart.

Tensors compute as they do on a CPU, at once. Meanwhile every operation is noted as work of the stream that is current,
with the parts of memory that it reads and writes. Two that touch the same bytes, one of them writing, must be ordered:
by a stream's own order, by events, or by a host that waits. Memory that is given back must not be in use by a stream
which the stream that took it has not waited for: an allocator would lend it on.

Timelines are vector clocks (Fidge 1988, Mattern 1989): a timeline's clock has, for every timeline, how much of that is
known to be over before what it does next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from attrs import Factory, define, frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsx.contracts import CHANNELS, Channel, Handle, Operation, Purpose, Transport
from dsx.plugin import Descriptor, Fill, Part, hook

Clock = dict[str, int]


@define(eq=False)
class Timeline:
    """A stream, or the host."""

    name: str
    clock: Clock = Factory(dict)

    def learn(self, clock: Mapping[str, int]) -> None:
        """What is over by that clock is over for what comes next here."""
        for name, tick in clock.items():
            self.clock[name] = max(tick, self.clock.get(name, 0))


@frozen(eq=False)
class Access:
    """Bytes [low, high) of a memory, touched at a tick of a timeline."""

    low: int
    high: int
    writes: bool
    timeline: str
    tick: int
    what: str

    def over(self, clock: Mapping[str, int]) -> bool:
        return clock.get(self.timeline, 0) >= self.tick

    def clashes(self, other: Access) -> bool:
        return (self.writes or other.writes) and self.low < other.high and other.low < self.high


@define(eq=False)
class Memory:
    """A storage that is kept so that no other has its number; who took it; what touched it and may matter still."""

    storage: torch.UntypedStorage
    owner: Timeline
    accesses: list[Access] = Factory(list)

    @property
    def dropped(self) -> bool:
        return bool(torch._C._storage_Use_Count(self.storage._cdata) == 1)


class Recorder(TorchDispatchMode):
    """Notes what is computed within it.

    device  type of the device whose tensors streams work on; others are the host's
    races   what nothing keeps apart, in words
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device, self.races = device, list[str]()
        self.host, self.default = Timeline("host"), Timeline("default")
        self.current = self.default
        self._memories: dict[int, Memory] = {}
        self._streams = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        source = args[1] if func is torch.ops.aten.copy_.default else None
        blank = source is not None and source.is_meta and not args[0].is_meta  # what a real device would have copied
        result = args[0] if blank else func(*args, **kwargs)
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        on_device = any(tensor.device.type == self.device for tensor in (*tensors, *made))
        timeline = self.current if on_device else self.host
        for tensor in made:
            self._memory(tensor, timeline)
        if not func.is_view:
            changed = _changed(func, args, kwargs)
            read = [tensor for tensor in tensors if not any(tensor is other for other in changed)]
            filled = [] if str(func).startswith("aten.empty") else made
            self.touch([*read, *changed], [*changed, *filled], str(func), timeline)
        return result

    def touch(
        self, reads: Iterable[Tensor], writes: Iterable[Tensor], what: str, timeline: Timeline | None = None
    ) -> None:
        """Something reads and writes; None: in the current stream."""
        timeline = timeline or self.current
        self.look()
        timeline.learn(self.host.clock)  # the host asked for it after all that it did before
        tick = timeline.clock[timeline.name] = timeline.clock.get(timeline.name, 0) + 1
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                if tensor.numel():
                    self._access(tensor, writing, timeline, tick, what)

    def took(self, tensor: Tensor) -> None:
        """The memory behind a tensor is new: the current stream took it."""
        self._memories[tensor.untyped_storage()._cdata] = Memory(tensor.untyped_storage(), self.current)

    def gave(self, tensor: Tensor) -> None:
        """It is given back, and the tensor stays."""
        self._given_back(self._memory(tensor, self.current))

    def look(self) -> None:
        """Find what was dropped."""
        for number, memory in list(self._memories.items()):
            if memory.dropped:
                self._given_back(memory)
                del self._memories[number]

    def _memory(self, tensor: Tensor, timeline: Timeline) -> Memory:
        storage = tensor.untyped_storage()
        return self._memories.setdefault(storage._cdata, Memory(storage, timeline))

    def _access(self, tensor: Tensor, writing: bool, timeline: Timeline, tick: int, what: str) -> None:
        memory, (low, high) = self._memory(tensor, timeline), _bytes_of(tensor)
        now = Access(low, high, writing, timeline.name, tick, what)
        for before in memory.accesses:
            if before.clashes(now) and not before.over(timeline.clock):
                self._race(f"{what} of {timeline.name} does not wait for {before.what} of {before.timeline}")
        known = [a for a in memory.accesses if writing and low <= a.low and a.high <= high and a.over(timeline.clock)]
        memory.accesses = [*(access for access in memory.accesses if access not in known), now]

    def _given_back(self, memory: Memory) -> None:
        owner = memory.owner
        if owner is self.host:  # a host's allocator waits for what a device does with its memory
            return
        owner.learn(self.host.clock)
        for access in memory.accesses:
            if not access.over(owner.clock):
                self._race(f"memory of {owner.name} is given back while {access.what} of {access.timeline} uses it")

    def _race(self, words: str) -> None:
        if words not in self.races:
            self.races.append(words)

    # ---- what torch's module of a device has

    def Stream(self, device: object = None) -> Stream:
        self._streams += 1
        return Stream(self, Timeline(f"side {self._streams}"))

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: object = None) -> Stream:
        return Stream(self, self.current)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.timeline
        try:
            yield
        finally:
            self.current = before


@frozen(eq=False)
class Stream:
    """As torch.cuda.Stream."""

    recorder: Recorder
    timeline: Timeline

    def wait_stream(self, other: Stream) -> None:
        self.recorder.look()
        self.timeline.learn(other.timeline.clock)

    def wait_event(self, event: Event) -> None:
        event.wait(self)


@define(eq=False)
class Event:
    """As torch.cuda.Event."""

    recorder: Recorder
    clock: Clock = Factory(dict)

    def record(self, stream: Stream) -> None:
        self.recorder.look()
        self.clock = dict(stream.timeline.clock)

    def wait(self, stream: Stream) -> None:
        self.recorder.look()
        stream.timeline.learn(self.clock)

    def synchronize(self) -> None:
        self.recorder.look()
        self.recorder.host.learn(self.clock)


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, device: str = "cpu") -> Iterator[Recorder]:
    """Everything within runs on a device whose streams are records."""
    recorder = Recorder(device)
    monkeypatch.setattr("dsx.contracts.streams._module", lambda device: recorder)
    with recorder:
        yield recorder
    recorder.look()


class Collectives(Transport):
    """As NCCL for one rank: each channel has a stream of its own, which begins after the caller's, and which whoever
    waits waits for."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._streams = {channel: recorder.Stream() for channel in CHANNELS}

    def all_gather(self, out: Tensor, shard: Tensor, *, channel: Channel, purpose: Purpose) -> Handle:
        return self._work("all_gather", [shard], out, channel)

    def reduce_scatter(
        self, out: Tensor, whole: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose
    ) -> Handle:
        return self._work("reduce_scatter", [whole], out, channel)

    def all_reduce(self, tensor: Tensor, op: Operation = "mean", *, channel: Channel, purpose: Purpose) -> Handle:
        return self._work("all_reduce", [tensor], tensor, channel)

    def broadcast(self, tensor: Tensor, root: int = 0, *, channel: Channel, purpose: Purpose) -> Handle:
        return self._work("broadcast", [tensor], tensor, channel)

    def host(self) -> Transport:
        return Transport()

    def _work(self, what: str, reads: Iterable[Tensor], out: Tensor, channel: Channel) -> Handle:
        recorder, event, stream = self._recorder, self._recorder.Event(), self._streams[channel]
        stream.wait_stream(recorder.current_stream())
        with recorder.stream(stream):
            for source in reads:
                if source.data_ptr() != out.data_ptr():
                    out.copy_(source)
            recorder.touch(reads, [out], what)
        event.record(stream)
        return Handle([_Work(lambda: event.wait(recorder.current_stream()))])


@frozen
class _Work:
    wait: Callable[[], None]


class CollectivesPlugin:
    """For `dsx.prepare(..., plugins={"recorded": CollectivesPlugin(recorder)})`."""

    descriptor = Descriptor(
        name="recorded",
        section="communicate",
        contract=1,
        fills={"transport": Fill(offers={"transport.exact"})},
    )

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    @hook
    def dsx_communicate(self) -> list[Part]:
        return [Part("transport", lambda ctx: Collectives(self._recorder))]


def _changed(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Arguments that an operation writes to."""
    found = []
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            found += [tensor for tensor in tree_leaves(value) if isinstance(tensor, Tensor)]
    return found


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    width, start = tensor.element_size(), tensor.storage_offset()
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * width, (start + reach + 1) * width
