"""From the memory that tensors take to the memory that the process takes."""

from __future__ import annotations

from attrs import frozen

from dsx.plan.rehearsal import ACTIVATIONS, Rehearsal


@frozen
class Resident:
    """What a process takes beside its tensors.

    places   whose memory is the process's
    heap     bytes that the allocator takes of the system for each byte of activations: buffers of many sizes that come
             and go leave holes
    runtime  bytes of libraries once they were used, above those of their import
    narrow   bytes more where there are products in 16 bits, whose kernels are compiled when they are first used
    """

    places: tuple[str, ...]
    heap: float
    runtime: int
    narrow: int

    def total(self, found: Rehearsal) -> int:
        """Bytes of a rank's process on the device at the worst instant, above those of its imports."""
        holes = (self.heap - 1) * found.peak["device", ACTIVATIONS]
        narrow = self.narrow if any("float16" in dtype for dtype in found.work.flops) else 0
        return round(sum(found.on(place) for place in self.places) + holes + self.runtime + narrow)


RESIDENT = {
    "cpu": Resident(("device", "host"), 1.3, 26_000_000, 18_000_000),
    "cuda": Resident(("device",), 1.0, 0, 0),
}
"""By kind of device. Of a CPU: glibc's allocator, torch 2.13 with oneDNN, as measured with GPTs of 0.8, 25 and 60 M
parameters (tests/bench/plan.py). Of a GPU: tensors alone; its context and its allocator's holes were not measured."""
