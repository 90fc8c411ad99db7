"""Values of a state, borrowed from wherever they rest for as long as they are read or written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from dsx.contracts import Store


class Loans:
    """What is borrowed of a store now: of each state one part at a time."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._held: dict[Lent, Tensor] = {}

    def borrow(self, values: Lent) -> Tensor:
        """The values, until `give_back`."""
        if values not in self._held:
            found = self.store.fetch(values.key, [values.name], span=(values.start, values.stop))
            self._held[values] = found[values.name]
        return self._held[values]

    def give_back(self, changed: bool, only: Lent | None = None) -> None:
        """Everything that is borrowed, or one of it."""
        for values in [only] if only else list(self._held):
            del self._held[values]
            names = [values.name]
            self.store.put(values.key, dirty=names if changed else (), clean=() if changed else names)


class Values:
    """Consecutive elements that are always at hand.

    size, dtype  of them
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.size, self.dtype = tensor.numel(), tensor.dtype

    def tensor(self) -> Tensor:
        """The elements: [size]; borrowed until the loans are given back."""
        return self._tensor

    @contextmanager
    def changing(self) -> Iterator[Tensor]:
        """The elements, to be changed within the context."""
        yield self._tensor

    def part(self, start: int, stop: int) -> Values:
        """Elements [start, stop) of these."""
        return Values(self._tensor[start:stop])


class Lent(Values):
    """Elements [start, stop) of a state of the store."""

    def __init__(self, loans: Loans, key: str, name: str, start: int, stop: int) -> None:
        self._loans, self.key, self.name, self.start, self.stop = loans, key, name, start, stop
        self.size, self.dtype = stop - start, loans.store.kind(key, name).dtype

    def tensor(self) -> Tensor:
        return self._loans.borrow(self)

    @contextmanager
    def changing(self) -> Iterator[Tensor]:
        yield self.tensor()
        self._loans.give_back(changed=True, only=self)

    def part(self, start: int, stop: int) -> Lent:
        return Lent(self._loans, self.key, self.name, self.start + start, self.start + stop)


def of_state(loans: Loans, key: str, name: str) -> Lent:
    """All of a state."""
    return Lent(loans, key, name, 0, loans.store.kind(key, name).size)
