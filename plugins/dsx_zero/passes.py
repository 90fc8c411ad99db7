"""In which order units are gathered, the same on every rank, whatever each of them does with the model.

Every forward and every backward is a *pass*. What ranks gathered in a pass is merged into one sequence for later passes
of its kind: they follow it without a word, and gather ahead. A unit that a rank skips is taken part in and dropped. A
rank that wants a unit which is not ahead in the sequence takes part in the rest of it and then asks: at the end of each
pass all ranks say what they still want, which is usually nothing, until nobody wants anything. So no branch, early exit
or change of order can make ranks wait for one another for ever, as long as all make the same passes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

from dsx.contracts import Transport
from dsx_zero.exchange import exchange
from dsx_zero.merge import merge
from dsx_zero.residence import Residence

NOTHING = -1
GROWTH = 4
"""A sequence that has grown to so many times what any rank used in a pass is begun anew."""


class Passes:
    """The protocol of gathers.

    words    among host tensors of the same ranks
    depth    units gathered ahead of use
    skipped  is told of every unit that this rank passes over
    alone    whether ranks need not make the same passes: within `uneven`
    regular  whether in the last pass all ranks gathered just what was expected
    """

    def __init__(
        self, memory: Residence, words: Transport, depth: int, skipped: Callable[[int], None] = lambda number: None
    ) -> None:
        self._memory, self._words, self._depth, self._skipped = memory, words, depth, skipped
        self._known: dict[Hashable, list[int]] = {}
        self.alone = False
        self.open = False
        self.key: Hashable = None
        self.kept: frozenset[int] = frozenset()
        self._expected: list[int] = []
        self._at = self._issued = 0
        self._used: list[int] = []
        self._record = False
        self._held = NOTHING
        self._strayed = False
        self.regular = True

    def begin(
        self,
        key: Hashable,
        guess: Sequence[int],
        keep: Callable[[Sequence[int]], frozenset[int]],
        hold: int = NOTHING,
    ) -> None:
        """A pass starts.

        key    its kind: passes of one kind are expected to gather alike
        guess  what the first of its kind may gather
        keep   of what is expected, the units that stay live after the pass, on every rank
        hold   a live unit that stays until another is wanted
        """
        known = self._known.get(key)
        self.key, self._record, self.open = key, known is None, True
        self._expected = [] if self.alone else list(guess if known is None else known)
        self._at = self._issued = 0
        self._used, self._held, self._strayed = [], hold, False
        self.kept = keep(self._expected)
        self._issue(self._depth - 1)

    def want(self, number: int) -> None:
        """Make a unit live that is not."""
        try:
            index = self._expected.index(number, self._at)
        except ValueError:
            self._ask(number)
            self._used.append(number)
            return
        self._skip_to(index)
        again = self._expected[index + 1 : index + 2] == [number]
        self._hold(number if again else NOTHING)
        self._issue(index + again)
        self._at = index + 1 + again
        self._issue(index + again + self._depth, arriving=number)
        self._memory.arrive(number)
        self._used.extend([number, number] if again else [number])

    def release(self, number: int) -> None:
        """This rank is done with a unit for now."""
        if number != self._held and number not in self.kept:
            self._memory.release(number)

    def end(self) -> None:
        """Finish what the other ranks expect of this one. Entered by all of them."""
        self._skip_to(len(self._expected))
        self._hold(NOTHING)
        self.open, self.regular = False, True
        if self.alone:
            return
        self._serve()
        if self._record:
            self._learn()

    @property
    def sequence(self) -> Sequence[int]:
        """What the pass was expected to gather."""
        return self._expected

    @contextmanager
    def uneven(self) -> Iterator[None]:
        """Every gather is asked for: ranks need not make the same passes. On leaving, the others are served until all
        have left."""
        self.alone = True
        try:
            yield
        finally:
            self._serve()
            self.alone = False

    def _issue(self, last: int, arriving: int = NOTHING) -> None:
        """Start the gathers up to position `last`: of a unit that comes twice running, one; not of a unit that is
        already on its way for an earlier use."""
        while self._issued <= min(last, len(self._expected) - 1):
            number = self._expected[self._issued]
            if self._issued == 0 or self._expected[self._issued - 1] != number:
                if number in self._expected[self._at : self._issued] or number == arriving:
                    return
                self._memory.gather(number)
            self._issued += 1
        if self._issued < len(self._expected):
            self._memory.foresee(self._expected[self._issued])

    def _skip_to(self, index: int) -> None:
        self._strayed |= index > self._at
        while self._at < index:
            number = self._expected[self._at]
            self._issue(self._at)
            self._memory.arrive(number)
            self._at += 1
            self.release(number)
            self._skipped(number)

    def _hold(self, number: int) -> None:
        """Keep a unit that is used several times running from being released in between."""
        held, self._held = self._held, number
        if held not in (NOTHING, number):
            self.release(held)

    def _ask(self, number: int) -> None:
        if not self.alone:
            self._skip_to(len(self._expected))
        self._strayed = True
        self._hold(NOTHING)
        self._round(number)

    def _serve(self) -> None:
        """Take part in what other ranks still want, until none wants anything."""
        while self._round(NOTHING):
            pass

    def _round(self, mine: int) -> set[int]:
        """All ranks say what they want, and gather all of it together."""
        rows = self._tell([mine, self._strayed])
        self.regular = self.regular and not any(strayed for _, strayed in rows)
        wanted = {number for number, _ in rows} - {NOTHING}
        for number in sorted(wanted):
            self._record = True
            self._memory.gather(number)
            self._memory.arrive(number)
            if number != mine:
                self.release(number)
        return wanted

    def _learn(self) -> None:
        """The sequence for later passes of this kind, from what every rank used in this one."""
        lengths = [length for (length,) in self._tell([len(self._used)])]
        padded = self._tell([*self._used, *[NOTHING] * (max(lengths) - len(self._used))])
        used = [row[:length] for row, length in zip(padded, lengths, strict=True)]
        old = self._known.get(self.key, [])
        merged = merge([old, *used])
        if len(merged) > GROWTH * max(lengths):
            merged = merge(used)
        self._known[self.key] = merged
        self._expected = merged

    def _tell(self, row: Sequence[int]) -> list[list[int]]:
        return exchange(self._words, row, "gather")
