"""The wish that a run should end early, from Ctrl-C or SIGTERM to the step that heeds it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from attrs import define

__all__ = ["follow", "heed_no_more", "install_handlers", "stop_requested"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@define
class _Stop:
    """What this process knows of a wish to stop.

    asked   the number of the signal that it got itself, or 0
    file    where the launcher writes the number of its own, or None without a launcher
    heeds   the file by which the launcher knows that this rank will see `file`
    heeded  whether it is there
    """

    asked: int = 0
    file: str | None = None
    heeds: Path | None = None
    heeded: bool = False


_stop = _Stop()


def stop_requested() -> int:
    """The number of the signal that asked this run to stop (2, 15), or 0; cheap enough to ask in every step.

    To ask is to promise: the launcher waits for ranks that have asked once, and ends the others at once.
    """
    if _stop.heeds is not None and not _stop.heeded:
        _stop.heeds.touch()
        _stop.heeded = True
    if not _stop.asked and _stop.file is not None and os.path.exists(_stop.file):
        _stop.asked = int(Path(_stop.file).read_text())
    return _stop.asked


def heed_no_more() -> None:
    """Take the promise back: until somebody asks again, the launcher ends this rank at once."""
    if _stop.heeds is not None:
        _stop.heeds.unlink(missing_ok=True)
        _stop.heeded = False


def follow(file: Path, heeds: Path) -> None:
    """Let `stop_requested` answer with the number in `file` once it exists, and make `heeds` when first asked."""
    _stop.asked, _stop.file, _stop.heeds, _stop.heeded = 0, str(file), heeds, False


@contextmanager
def install_handlers() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into an answer of `stop_requested`; the second acts as it would have.

    Does nothing in a rank that follows a launcher, which is the one to be told, nor outside the main thread, where
    Python does not let handlers be set.
    """
    if _stop.file is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: FrameType | None) -> None:
        _stop.asked = number
        restore()

    _stop.asked = 0
    for number in _SIGNALS:
        signal.signal(number, note)
    try:
        yield
    finally:
        restore()
        _stop.asked = 0
