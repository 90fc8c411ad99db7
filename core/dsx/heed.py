"""Training that ends between two updates when it is asked to, on all ranks after the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dsx.contracts import Report
from dsx.launch.stop import heed_no_more, install_handlers, stop_requested

if TYPE_CHECKING:
    from dsx.engine import Engine

_ASKED, _NUMBER = "stop", "signal"


@contextmanager
def stopping(engine: Engine) -> Iterator[Callable[[Report], int]]:
    """Within this, Ctrl-C and SIGTERM (a queue's notice that time is up) end nothing by themselves.

        with dsx.stopping(engine) as asked:
            for batches in updates:
                if asked(engine.train_step(batches)):
                    engine.save("stopped")
                    break

    `asked(report)` is the number of the signal (2, 15) that any rank was sent, or its launcher, or 0: the same on all
    ranks, from the update on whose vote it came along with. A second signal acts as it would have without, and so does
    the first one afterwards.
    """
    with install_handlers():
        listen(engine)
        try:
            yield asked
        finally:
            for word in (_ASKED, _NUMBER):
                engine.words.pop(word, None)
            heed_no_more()


def listen(engine: Engine) -> None:
    """From now on updates bring word to all ranks of signals that `dsx.launch.stop` noted; for `asked`."""
    engine.words[_ASKED] = lambda: float(stop_requested() > 0)
    engine.words[_NUMBER] = lambda: float(stop_requested())


def asked(report: Report) -> int:
    """The signal that some ranks had heard of, the same on all; 0 if none had, or within a window."""
    ranks = report.words.get(_ASKED, 0)
    return round(report.words[_NUMBER] / ranks) if ranks else 0
