"""A thread that finishes operations in the order in which they were issued."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class Task:
    """One operation on a line. What it raises is raised by `wait`."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work: Callable[[], object] | None = work
        self._over = threading.Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do it, on the line's thread."""
        work, self._work = self._work, None
        try:
            assert work is not None
            work()
        except BaseException as error:
            self._error = error
        finally:
            self._over.set()

    def wait(self) -> None:
        """Block until it is done."""
        self._over.wait()
        if self._error is not None:
            raise self._error


class Line:
    """Starts its thread with the first task; the thread ends when the line is dropped."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.stop = weakref.finalize(self, self._tasks.put, None)

    def add(self, work: Callable[[], object]) -> Task:
        """Do `work` after what was added before."""
        if self._thread is None:
            self._thread = threading.Thread(target=_serve, args=(self._tasks,), daemon=True)
            self._thread.start()
        task = Task(work)
        self._tasks.put(task)
        return task


def _serve(tasks: SimpleQueue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # it may hold the last reference to a buffer, and the next may be long in coming
