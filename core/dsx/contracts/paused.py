"""Work that pauses where it waits for other ranks, and other work meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

_END = object()


class Paused:
    """Works under way, a step of each whenever another begins.

    The latest goes first, so that all ranks wait for exchanges in the order in which they were issued; of works with as
    many steps, the first to begin ends first.
    """

    def __init__(self) -> None:
        self._works: list[tuple[Iterator[object], Callable[[], object]]] = []

    def add(self, work: Iterator[object], over: Callable[[], object]) -> None:
        """Begin `work`, then go on with the others; `over` is called when it has ended."""
        begins = next(work, _END) is not _END
        self._step()
        if begins:
            self._works.append((work, over))
        else:
            over()

    def finish(self) -> None:
        """Go on until all have ended."""
        while self._works:
            self._step()

    def _step(self) -> None:
        goes_on = [next(work, _END) is not _END for work, _ in reversed(self._works)]
        works, self._works = self._works, []
        for (work, over), more in zip(works, reversed(goes_on), strict=True):
            if more:
                self._works.append((work, over))
            else:
                over()
