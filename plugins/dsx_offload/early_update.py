"""Plugin `early_update`: states in files are updated during backward, before the vote, and the vote says whether that
stands (Lian et al. 2025, SuperOffload, arXiv 2509.21271: speculation, then validation); what is left, in the next
forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Job, Layout, Part, Piece, Rule, Shard, Side, Stepper, Store, Walk, Watcher
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Need, hook, positive
from dsx.plugin import Part as Filler
from dsx_offload.staged import Staged
from dsx_offload.turns import Turn, Turns, alike

COPIES = 3
"""Pieces of gradients that may be in use: one that is updated, one on its way, and one of the piece before."""


@frozen(kw_only=True)
class Options:
    """`[optimize.early_update]`.

    threads  of the update beside training, on CPUs; None: as many as torch uses for a step
    """

    threads: Annotated[int, positive] | None = None


class Early(Stepper, Watcher):
    """As soon as a shard's gradient is final, a thread makes its update, as the engine expects it to be: with gradients
    that are finite and not clipped. New states are written beside the old ones and the new parameter to memory of its
    own. If the vote then wants just that, they take the place of the old ones; else they are forgotten, and the update
    is made anew. So the result is that of plain training, bit for bit.

    What is left at the vote is made during the next forward, which waits for a unit's update when it enters it. Of the
    shards that are ready, the one whose parameter is used first comes first: the last one that became final in
    backward, and the next one in forward.

    stood  updates of shards so far that were begun before the vote, and wanted
    late   those that were made after it

    Holds, beside everything else, one parameter of each shard; and its states a second time, where they rest.
    """

    expects = True

    def __init__(self, rule: Rule, layout: Layout, store: Store, options: Options, device: torch.device) -> None:
        self._rule, self._layout, self._store, self._device = rule, layout, store, device
        self._threads = options.threads or torch.get_num_threads()
        self._side = Side.of(device)
        self._walk = Walk(rule, layout, store)  # of the thread
        self._own = Walk(rule, layout, store)
        self._staged = Staged(self._own, layout, store, device)
        self._able: dict[Shard, Sequence[str]] = {}
        self._turns = Turns(layout.shards)
        self._places = {shard: number for number, shard in enumerate(layout.shards)}
        self._here: set[Shard] = set()  # those of which a state is elsewhere, updated by the engine's own thread
        self._in_place: set[Shard] = set()  # those that the thread updated after the vote
        self._decided, self._published = False, 0
        self._copies: deque[Tensor] = deque()
        self._worker: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self.stood = self.late = 0

    def prepare(self) -> None:
        """When the states exist: take space for second values."""
        for shard in self._layout.shards:
            names = [name for name in self._store.names(shard.key) if name not in ("param", "grad")]
            if names and self._store.alternate(shard.key, names):
                self._able[shard] = names
        if not self._able:
            raise DsxError(
                "'early_update' has nothing to do: no shard has all of its optimizer's states in files",
                where="[optimize] use",
                remedy="add \"nvme_offload\" to partition.use, or remove 'early_update'",
            )

    # ---- during backward

    def expect(self, job: Job) -> None:
        if self._decided:
            self.drain()
        expected = self._turns.job
        if expected is not None and not all(alike(shard, expected, job) for shard in self._able):
            self.forget()
        self._turns.job = job
        self._walk.prepare(self._turns.upcoming())

    def final(self, shard: Shard) -> None:
        if self._turns.job is None or shard not in self._able:
            return
        self._staged.of(shard)
        self._side.follow()
        self._begin([shard])

    def revoked(self, shard: Shard) -> None:
        if self._turns.take_back(shard):
            self._store.forget(shard.key, self._able[shard])

    def _begin(self, shards: Iterable[Shard]) -> None:
        idle = self._turns.add(shards)
        if idle and self._device.type == "meta":  # on paper nothing runs beside anything
            self._work()
        elif idle:
            self._worker = self._worker or ThreadPoolExecutor(
                1, "dsx-early", initializer=lambda: torch.set_num_threads(self._threads)
            )
            self._running = self._worker.submit(self._work)

    # ---- the thread

    def _work(self) -> None:
        try:
            with torch.no_grad(), self._side.within():
                while (turn := self._turns.next()) is not None:
                    self._update(turn)
                    if not self._turns.made(turn):
                        self._store.forget(turn.shard.key, self._able[turn.shard])
                self._walk.prepare(self._turns.upcoming())
        except BaseException as failure:
            self._turns.fail(failure)

    def _update(self, turn: Turn) -> None:
        shard, job = turn.shard, turn.job
        sweep = partial(self._walk.sweep, self._call(job), shards=[shard], following=self._turns.upcoming())
        self._store.aside(shard.key, self._able[shard])
        if turn.decided:  # then nothing has to be undone, and nobody uses the parameter until it is wanted
            sweep(partial=not all(job.used))
            self._in_place.add(shard)
            return
        if "master" not in self._store.names(shard.key) or not all(job.used):
            self._staged.copy_live(shard)
        sweep(target=self._staged.part, gradient=self._copy_gradient)

    def _call(self, job: Job) -> Callable[[Piece, Mapping[str, Tensor]], Iterator[object] | None]:
        nothing = torch.zeros(0, len(job.used), dtype=torch.float64)
        return lambda piece, states: self._rule.update(piece, states, job, nothing)

    def _copy_gradient(self, part: Part) -> Tensor:
        """The rule may overwrite it, and it is read again if the update is made anew."""
        gradient = self._layout.gradient_of(part.piece.shard, part.span)
        room = self._copies.popleft() if len(self._copies) == COPIES else torch.empty(0, device=gradient.device)
        if room.dtype != gradient.dtype or room.numel() < gradient.numel():
            room = torch.empty_like(gradient)
        self._copies.append(room)
        return room[: gradient.numel()].copy_(gradient)

    # ---- after the vote

    def settle(self) -> None:
        """Nothing is left over when a backward begins."""
        return

    def start(self, job: Job) -> None:
        wrong = self._turns.decide(job)
        for shard in wrong:
            self._store.forget(shard.key, self._able[shard])
        begun, known = self._turns.begun(), self._turns.known()
        self.stood += len(begun)
        self.late += len(self._layout.shards) - len(begun)
        self._decided, self._published = True, 0
        for shard in self._able:
            self._staged.of(shard)
        self._side.follow()
        self._begin(shard for shard in self._able if shard not in known)
        if others := [shard for shard in self._layout.shards if shard not in self._able]:
            self._own.sweep(self._call(job), self._at_hand, partial=not all(job.used), shards=others)
        self._publish()
        self._end()

    def wanted(self, shard: Shard) -> None:
        if self._decided:
            self._publish(self._places[shard] + 1)
            self._end()

    def _at_hand(self, shard: Shard) -> None:
        self._here.add(shard)
        self._publish()

    def _publish(self, until: int = 0) -> None:
        """Those before `until`, and what else is updated as far as there is no gap: the order is the same on all ranks,
        which exchange what is published, and do not know how far the others are."""
        shards = self._layout.shards
        while self._published < len(shards):
            shard = shards[self._published]
            able = shard in self._able
            if not (self._turns.wait(shard, self._published < until) if able else shard in self._here):
                if self._published < until:
                    self._finish()
                return
            if able:
                self._side.join()
                self._store.keep(shard.key, self._able[shard])
                if shard not in self._in_place:
                    self._staged.show(shard)
            self._layout.publish(shard)
            self._published += 1

    def _end(self) -> None:
        if self._decided and self._published == len(self._layout.shards):
            self._finish()
            self._reset()
            self._layout.reset()
            self._walk.prepare(self._turns.upcoming())

    def _reset(self) -> Collection[Shard]:
        self._decided = False
        self._here.clear()
        self._in_place.clear()
        return self._turns.reset()

    def forget(self) -> None:
        self._turns.cancel()
        self._finish()
        for shard in self._reset():
            self._store.forget(shard.key, self._able[shard])

    def drain(self) -> None:
        if self._decided:
            self._publish(len(self._layout.shards))
            self._end()
        self._finish()

    def close(self) -> None:
        self.forget()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def bytes(self) -> Mapping[str, int]:
        copies = sum(tensor.numel() * tensor.element_size() for tensor in self._copies)
        return {"early param": self._staged.bytes(), "early grad": copies}

    def _finish(self) -> None:
        """Wait until the thread has nothing to do. Raises what happened to it."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
        if (failure := self._turns.failure) is not None:
            self._reset()
            raise failure
        self._side.join()


descriptor = Descriptor(
    name="early_update",
    section="optimize",
    contract=1,
    options=Options,
    fills={
        "stepper": Fill(
            needs=[
                Need("rule.silent", "a thread beside the backward must not communicate"),
                Need("rule.pieces", "what is written beside the old states is written piece by piece"),
                Need("gradients.early", "it begins with a shard when its gradient is final"),
            ]
        )
    },
    summary="states in files are updated during backward and the next forward, bit for bit",
)


@hook
def dsx_optimize(options: Options) -> list[Filler]:
    return [Filler("stepper", lambda ctx: _build(options, ctx), bind=lambda stepper, ctx: stepper.prepare())]


def _build(options: Options, ctx: Context) -> Early:
    rule, paper = ctx.rule, ctx.plan.device.type == "meta"  # where the rule may be another's stand-in
    if rule.sums or (rule.whole and not paper) or any(state.shape != "element" for state in rule.states):
        raise DsxError(
            "'early_update' cannot run with this optimizer",
            where="[optimize] use",
            found="a rule that needs whole parameters, or sums over them",
            remedy="remove 'early_update', or choose an elementwise optimizer",
        )
    stepper = Early(rule, ctx.layout, ctx.store, options, ctx.plan.device)
    ctx.layout.watch(stepper)
    return stepper
