"""Where samples come from: by index, in an order of our own, or from a stream, in its order; resumable at any sample.

A source is anything with a length and `[i] -> sample`, or an iterable. Every rank is given the same source and takes
its own part. It may have

    held_out                              another source with a length, to evaluate on
    sample(model) -> str                  a text that shows what the model has learnt
    state_dict(), load_state_dict(state)  an iterable's position, of numbers, texts, tensors and containers of them, so
    that
                                          a resumed run need not pass over what was seen (torchdata's loaders fit)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

from attrs import define

from dsx.errors import DsxError
from dsx.run.order import shuffled


class Window(Protocol):
    """Consecutive samples, of which this rank has some.

    count  how many there are over all ranks; fewer than asked for if a stream has ended
    """

    count: int

    def __getitem__(self, slot: int) -> Any:
        """The sample at `slot` of the window."""

    def spare(self) -> Any:
        """Any sample of the window, for a rank that has none of its own."""


class Samples(Protocol):
    """An endless or ending sequence of samples, by global index."""

    def first(self) -> Any:
        """A sample to look at; it is not used up."""

    def window(self, first: int, size: int, wanted: Collection[int]) -> Window:
        """Samples [first, first + size); those of the slots in `wanted` will be asked for."""

    def state(self) -> Mapping[str, Any] | None:
        """What a checkpoint keeps besides the index of the next sample."""

    def resume(self, first: int, state: Mapping[str, Any] | None) -> None:
        """Continue at global index `first`."""


def samples_of(source: Any, seed: int) -> Samples:
    """The samples of a source. Raises `DsxError` for what is no source, or is empty."""
    if hasattr(source, "__getitem__") and hasattr(source, "__len__"):
        if len(source) == 0:
            raise DsxError("the data source has no samples", where="data.source")
        return Indexed(source, seed)
    if not hasattr(source, "__iter__"):
        raise DsxError(
            f"the data source is a {type(source).__name__}",
            where="data.source",
            expected="something with a length and [i], or an iterable",
        )
    return Streamed(source)


class Indexed:
    """Epoch after epoch of a source with a length, each in an order of its own."""

    def __init__(self, source: Any, seed: int) -> None:
        self._source, self._seed = source, seed

    def window(self, first: int, size: int, wanted: Collection[int]) -> Window:
        return _IndexedWindow(self, first, size)

    def first(self) -> Any:
        return self.at(0)

    def at(self, index: int) -> Any:
        """The sample at a global index."""
        return self._source[shuffled(index, len(self._source), self._seed)]

    def state(self) -> None:
        """The index says it all."""

    def resume(self, first: int, state: Mapping[str, Any] | None) -> None:
        """Any index is reached at once."""


@define
class _IndexedWindow:
    samples: Indexed
    first: int
    count: int

    def __getitem__(self, slot: int) -> Any:
        return self.samples.at(self.first + slot)

    def spare(self) -> Any:
        return self[0]


class Streamed:
    """The samples of an iterable, in its order, started anew when it ends; each rank passes over the others' samples.

    One that cannot be started anew, such as a generator, ends the run when it ends.
    """

    def __init__(self, source: Any) -> None:
        self._source, self._stream, self._position = source, iter(source), 0
        self._peeked: list[Any] = []

    def first(self) -> Any:
        if not self._peeked:
            sample = self._next()
            self._position -= 1
            self._peeked.append(sample)
        return self._peeked[0]

    def window(self, first: int, size: int, wanted: Collection[int]) -> Window:
        if first < self._position:
            self._stream, self._position, self._peeked = iter(self._source), 0, []
        while self._position < first and self._next() is not _END:
            pass
        held: dict[int, Any] = {}
        count = 0
        while count < size and (sample := self._next()) is not _END:
            if count in wanted or not held:
                held[count] = sample
            count += 1
        return _StreamedWindow(held, count)

    def _next(self) -> Any:
        if self._peeked:
            self._position += 1
            return self._peeked.pop()
        for _ in range(2):
            for sample in self._stream:
                self._position += 1
                return sample
            self._stream = iter(self._source)
        if self._position == 0:
            raise DsxError("the data source has no samples", where="data.source")
        return _END

    def state(self) -> Mapping[str, Any] | None:
        take = getattr(self._source, "state_dict", None)
        return None if take is None else {"source": take()}

    def resume(self, first: int, state: Mapping[str, Any] | None) -> None:
        if state is None or not hasattr(self._source, "load_state_dict"):
            return  # the first window passes over what was seen
        self._source.load_state_dict(state["source"])
        self._stream, self._position, self._peeked = iter(self._source), first, []


_END = object()


@define
class _StreamedWindow:
    held: dict[int, Any]
    count: int

    def __getitem__(self, slot: int) -> Any:
        return self.held[slot]

    def spare(self) -> Any:
        return next(iter(self.held.values()))
