"""Gradients as they arrive, and the order in which they are reduced: what every layout has to get right.

A *bucket* is a run of flat parameters whose gradients share one buffer and one reduction. It is sent when the last
gradient of its parameters has arrived, in an order that is the same on every rank: rank 0's of the first step. What
arrives after its bucket was sent (a second backward, a branch that other ranks did not take) waits in a side buffer,
and the vote makes all ranks send that bucket's rest together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dsx.contracts.data import Flat
from dsx.contracts.dtypes import Dtypes
from dsx.contracts.memory import with_values
from dsx.contracts.transport import Transport


class Slot:
    """Gradients of one flat parameter.

    start  where it begins in its bucket's buffer
    fresh  numbers of the segments whose gradients are in the buffer
    used   numbers of those that had a gradient since the last `reset`
    """

    def __init__(self, flat: Flat, bucket: Bucket, start: int) -> None:
        self.flat, self.bucket, self.start = flat, bucket, start
        self.fresh: set[int] = set()
        self.used: set[int] = set()
        self.seen = [0] * len(flat.segments)
        self.absent: set[int] = {n for n, segment in enumerate(flat.segments) if segment.start == segment.stop}

    def view(self, number: int, buffer: Tensor) -> Tensor:
        """A segment's part of the bucket's buffer, in its own shape."""
        return self.flat.segments[number].view(buffer[self.start : self.start + self.flat.size])

    @property
    def whole(self) -> Tensor:
        """This flat parameter's part of the bucket's buffer."""
        return self.bucket.memory()[self.start : self.start + self.flat.size]


class Bucket:
    """Flat parameters of one dtype that are reduced together.

    number  in the order in which backward is expected to reach them
    size    elements of the buffer
    buffer  [size]; None while nothing is in it
    """

    def __init__(
        self, number: int, dtype: torch.dtype, flats: Sequence[Flat], make: Callable[[Bucket], Tensor]
    ) -> None:
        self.number, self.dtype = number, dtype
        self._make = make
        self.slots: list[Slot] = []
        self.size = 0
        for flat in flats:
            self.slots.append(Slot(flat, self, self.size))
            self.size += flat.size
        self.buffer: Tensor | None = None
        self.sent = False
        self.left = 0
        self.extra: Tensor | None = None

    def memory(self) -> Tensor:
        """The buffer, made if there is none."""
        if self.buffer is None:
            self.buffer = self._make(self)
        return self.buffer

    def expect(self) -> None:
        """Count the gradients to wait for in a new backward."""
        self.left = sum(len(slot.flat.segments) - len(slot.absent) for slot in self.slots)

    def complete(self) -> Tensor:
        """The buffer, with zeros for parameters that had no gradient here: on another rank they may have had one."""
        buffer = self.memory()
        for slot in self.slots:
            for number in range(len(slot.flat.segments)):
                if number not in slot.fresh:
                    slot.view(number, buffer).zero_()
            slot.fresh.clear()
        return buffer


class Reductions:
    """The buckets of a layout, in the fixed order.

    send    starts the reduction of a bucket, all of whose gradients are there
    repair  reduces what came after a bucket was sent, and adds it: an exchange that all ranks make together; the tensor
            is this rank's part, None if it has none

    The layout calls `begin`, `arrived`, `flush` (what is left, zeros for what was unused) and, in `finish`, `settle`.
    """

    def __init__(
        self,
        transport: Transport,
        buckets: Sequence[Bucket],
        send: Callable[[Bucket], None],
        repair: Callable[[Bucket, Tensor | None], None],
    ) -> None:
        self._transport, self.buckets = transport, tuple(buckets)
        self._send_bucket, self._repair = send, repair
        self.order: list[Bucket] = list(buckets)
        self._slots = {slot.flat.key: slot for bucket in buckets for slot in bucket.slots}
        self._parameters = sum(len(slot.flat.segments) for slot in self._slots.values())
        self._recorded: list[Bucket] | None = []  # completion order of the first step; None once it was shared
        self._queue: deque[Bucket] = deque()
        self._pass, self._sending = 0, False
        self._again: list[Bucket] = []

    def slot(self, key: str) -> Slot:
        """The gradients of a flat parameter."""
        return self._slots[key]

    def begin(self, sending: bool) -> None:
        """A backward starts; `sending`: buckets are sent as they become complete."""
        self._pass += 1
        self._sending = sending
        for bucket in self.buckets:
            bucket.expect()
        self._queue = deque(bucket for bucket in self.order if not bucket.sent)

    def arrived(self, key: str, number: int, parameter: nn.Parameter) -> None:
        """Take a gradient of segment `number` of a flat parameter out of `parameter.grad`."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        slot = self._slots[key]
        bucket = slot.bucket
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if bucket.sent:
            if bucket.extra is None:
                bucket.extra = torch.zeros(bucket.size, dtype=bucket.dtype, device=gradient.device)
            slot.view(number, bucket.extra).add_(gradient)
        elif number in slot.fresh:
            slot.view(number, bucket.memory()).add_(gradient)
        else:
            slot.view(number, bucket.memory()).copy_(gradient)
            slot.fresh.add(number)
        slot.used.add(number)
        if slot.seen[number] != self._pass and number not in slot.absent:
            slot.seen[number] = self._pass
            bucket.left -= 1
            if bucket.left == 0 and self._sending:
                self._completed(bucket)

    def _completed(self, bucket: Bucket) -> None:
        if self._recorded is not None and bucket not in self._recorded:
            self._recorded.append(bucket)
        while self._queue and self._queue[0].left <= 0:
            self._send(self._queue.popleft())

    def _send(self, bucket: Bucket) -> None:
        bucket.sent = True
        self._send_bucket(bucket)

    def give_up(self, key: str) -> None:
        """No more gradients of a flat parameter are expected in this backward; one that comes all the same is late."""
        slot = self._slots[key]
        bucket = slot.bucket
        for number, seen in enumerate(slot.seen):
            if seen != self._pass and number not in slot.absent:
                slot.seen[number] = self._pass
                bucket.left -= 1
        if bucket.left == 0 and not bucket.sent and self._sending:
            self._completed(bucket)

    def flush(self) -> None:
        """Send what was not sent, in the fixed order."""
        for bucket in self.order:
            if not bucket.sent:
                self._send(bucket)
        self._queue.clear()

    def reopen(self) -> None:
        """The buffers were consumed: the next backward of the window fills and sends them anew."""
        for bucket in self.buckets:
            bucket.sent = False

    def mend(self) -> None:
        """Reduce what came late, where the last vote said that some rank has such."""
        for bucket in self._again:
            extra, bucket.extra = bucket.extra, None
            self._repair(bucket, extra)
        self._again = []

    def share_order(self, device: torch.device) -> None:
        """After the first step, everyone takes the order in which rank 0's buckets became complete."""
        if self._recorded is None:
            return
        order = dict.fromkeys([*self._recorded, *self.buckets])
        self._recorded = None
        numbers = torch.tensor([bucket.number for bucket in order], device=with_values(device))
        self._transport.broadcast(numbers, channel="admin", purpose="admin").wait()
        self.order = [self.buckets[number] for number in numbers.tolist()]

    def bytes(self) -> int:
        """Bytes of the buffers that buckets hold now."""
        tensors = [t for bucket in self.buckets for t in (bucket.buffer, bucket.extra) if t is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def used(self) -> Tensor:
        """[parameters], 1.0 where this rank had a gradient."""
        used = torch.zeros(self._parameters, dtype=torch.float64)
        for slot in self._slots.values():
            for number in slot.used:
                used[slot.flat.segments[number].index] = 1.0
        return used

    def words(self) -> Tensor:
        """[buckets], 1.0 where something came late."""
        return torch.tensor([float(bucket.extra is not None) for bucket in self.buckets], dtype=torch.float64)

    def agreed(self, used: Sequence[bool], words: Sequence[float]) -> bool:
        """What the vote said of `used` and `words`; True: something came late somewhere, and `mend` is to be called."""
        self._again = [bucket for bucket in self.order if words[bucket.number]]
        for slot in self._slots.values():
            segments = slot.flat.segments
            slot.absent = {n for n, part in enumerate(segments) if part.start == part.stop or not used[part.index]}
        return bool(self._again)

    def reset(self) -> None:
        """Forget the gradients."""
        for bucket in self.buckets:
            bucket.sent, bucket.extra = False, None
        for slot in self._slots.values():
            slot.used.clear()
            slot.fresh.clear()


def fill_buckets(
    flats: Sequence[Flat],
    dtypes: Dtypes,
    accumulation: int,
    limit_bytes: int,
    make: Callable[[Bucket], Tensor],
) -> list[Bucket]:
    """Buckets of at most `limit_bytes`, or of one flat parameter, in the order in which backward may reach them."""
    groups: list[tuple[torch.dtype, list[Flat]]] = []
    room = 0
    for flat in reversed(flats):
        dtype = dtypes.accumulate(flat.dtype, accumulation)
        size = flat.size * dtype.itemsize
        if not groups or groups[-1][0] != dtype or size > room:
            groups.append((dtype, []))
            room = limit_bytes
        groups[-1][1].append(flat)
        room -= size
    return [Bucket(number, dtype, members, make) for number, (dtype, members) in enumerate(groups)]
