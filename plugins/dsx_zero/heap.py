"""Memory that a step frees stays with the process for the next: fresh pages are cleared by the kernel at 1.5 GB/s."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # mallopt(3)
_LARGEST = 32 << 20
"""glibc's own limit for buffers that come from the heap."""
_KEPT = 256 << 20


def keep_freed() -> None:
    """Let glibc's heap keep up to 256 MiB that are free.

    Does nothing where the allocator is another one, or was set by the user (MALLOC_TRIM_THRESHOLD_ and the like).
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, _KEPT)
