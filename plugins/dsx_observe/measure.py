"""What observers measure themselves: training time, memory."""

from __future__ import annotations

import resource
import sys
import time

import torch


class Stopwatch:
    """Seconds of training: runs from when it is made, evaluations left out."""

    def __init__(self) -> None:
        self._since, self._paused = time.perf_counter(), 0.0

    @property
    def seconds(self) -> float:
        """Since it was made or last restarted; above 0."""
        return max(time.perf_counter() - self._since - self._paused, 1e-9)

    def pause(self, seconds: float) -> None:
        """Leave out `seconds` that were not training."""
        self._paused += seconds

    def lap(self) -> float:
        """Seconds, and restart."""
        seconds = self.seconds
        self._since, self._paused = time.perf_counter(), 0.0
        return seconds


def memory() -> dict[str, int]:
    """Bytes that this process held at most: `host`, resident; `device`, in tensors, where there is CUDA."""
    unit = 1 if sys.platform == "darwin" else 1024
    held = {"host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        held["device"] = torch.cuda.max_memory_allocated()
    return held
