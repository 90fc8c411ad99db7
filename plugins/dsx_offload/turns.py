"""Which shard a thread updates next, and which ones it has done."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from threading import Condition

from attrs import frozen

from dsx.contracts import Job, Shard


@frozen
class Turn:
    """What to update, and by which job.

    decided  whether that is what the vote decided
    """

    shard: Shard
    job: Job
    decided: bool


class Turns:
    """Between one thread that updates and another one that waits for it.

    order  of the shards' use: of those that wait, the first of it has its turn

    Which shard comes next is guessed from the last time. An update is made by the job that is expected, until one was
    `decided`. A shard that is at work then, by a job that turns out to be another, has its turn again.
    """

    def __init__(self, order: Sequence[Shard]) -> None:
        self._place = {shard: number for number, shard in enumerate(order)}
        self._turn = Condition()
        self._expected = list(reversed(order))
        self._came: dict[Shard, None] = {}
        self._waiting: set[Shard] = set()
        self._prepared: set[Shard] = set()
        self._at_work: Shard | None = None
        self._made: set[Shard] = set()
        self._busy = self._decided = False
        self.job: Job | None = None
        self.failure: BaseException | None = None

    # ---- for the thread that waits

    def add(self, shards: Iterable[Shard]) -> bool:
        """Shards that may be updated; whether nobody is at work who would."""
        with self._turn:
            shards = tuple(shards)
            self._waiting.update(shards)
            if not self._decided:
                self._came.update(dict.fromkeys(shards))
            idle, self._busy = not self._busy and bool(self._waiting), self._busy or bool(self._waiting)
            return idle

    def decide(self, job: Job) -> Collection[Shard]:
        """What the vote decided. Returns shards that were updated by another job: it is for the caller to undo that and
        to add them."""
        with self._turn:
            expected, self.job, self._decided = self.job, job, True
            wrong = {shard for shard in self._made if expected is None or not alike(shard, expected, job)}
            self._made -= wrong
            return wrong

    def begun(self) -> Collection[Shard]:
        """Shards that are updated, or at work."""
        with self._turn:
            return self._made | ({self._at_work} if self._at_work is not None else set())

    def known(self) -> Collection[Shard]:
        """Those, and what waits."""
        with self._turn:
            return {*self.begun(), *self._waiting}

    def wait(self, shard: Shard, patient: bool = True) -> bool:
        """Until a shard is updated: whether it is. Not `patient`: without waiting."""
        with self._turn:
            if patient:
                self._turn.wait_for(lambda: shard in self._made or self.failure is not None or not self._busy)
            return shard in self._made

    def take_back(self, shard: Shard) -> bool:
        """It has no turn, or had none: whether it was updated. Waits for it if it is at work."""
        with self._turn:
            self._turn.wait_for(lambda: self._at_work is not shard or self.failure is not None)
            self._waiting.discard(shard)
            known = shard in self._made
            self._made.discard(shard)
            return known

    def cancel(self) -> None:
        """What waits has no turn."""
        with self._turn:
            self._waiting.clear()

    def reset(self) -> Collection[Shard]:
        """All is over, or has failed; which shards were updated."""
        with self._turn:
            self.cancel()
            made, self._made = self._made, set()
            self._busy = self._decided = False
            self._at_work = self.job = self.failure = None
            self._prepared.clear()
            self._expected = [*self._came, *(shard for shard in self._expected if shard not in self._came)]
            self._came.clear()
            return made

    # ---- for the thread that updates

    def next(self) -> Turn | None:
        """Whose turn it is; None: nobody's, and a later `add` has to call somebody."""
        with self._turn:
            prepared = self._waiting if self._decided else self._waiting & self._prepared
            shard = min(prepared or self._waiting, key=self._place.__getitem__, default=None)
            if shard is None:
                self._busy = False
                self._turn.notify_all()
                return None
            self._waiting.remove(shard)
            self._prepared.discard(shard)
            self._at_work = shard
            assert self.job is not None
            return Turn(shard, self.job, self._decided)

    def upcoming(self) -> Iterator[Shard]:
        """Whose turns are likely to be next; what is taken of it is prepared then, and has its turn before others that
        wait, unless there is haste: when it is decided."""
        with self._turn:
            waiting = sorted(self._waiting, key=lambda shard: (shard not in self._prepared, self._place[shard]))
            known = self.known()
            coming = [] if self._decided else [shard for shard in self._expected if shard not in known]
        for shard in (*coming[:1], *waiting, *coming[1:]):
            with self._turn:
                self._prepared.add(shard)
            yield shard

    def made(self, turn: Turn) -> bool:
        """It was updated; or, if something else was decided meanwhile, it was in vain."""
        with self._turn:
            assert self.job is not None
            stands = alike(turn.shard, turn.job, self.job)
            (self._made if stands else self._waiting).add(turn.shard)
            self._at_work = None
            self._turn.notify_all()
            return stands

    def fail(self, failure: BaseException) -> None:
        """Nothing more will be updated: those who wait do not wait any longer, and find out why."""
        with self._turn:
            self.failure = failure
            self._turn.notify_all()


def alike(shard: Shard, one: Job, other: Job) -> bool:
    """Whether two jobs make the same update of a shard, to the bit."""
    if (one.number, one.multiplier) != (other.number, other.multiplier):
        return False
    segments = [part for part in shard.flat.segments if part.start < shard.stop and shard.start < part.stop]
    return all(
        one.used[part.index] == other.used[part.index]
        and one.steps[part.index] == other.steps[part.index]
        and one.hypers[part.group] == other.hypers[part.group]
        for part in segments
    )
