"""Plugin `early_update`: states in files are updated during backward, before the vote, and the vote says whether that
stands (Lian et al. 2025, SuperOffload, arXiv 2509.21271: speculation, then validation)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from threading import Lock
from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Job, Layout, Part, Rule, Shard, Side, Stepper, Store, Walk, Watcher, lasting
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Need, hook, positive
from dsx.plugin import Part as Filler

COPIES = 3
"""Pieces of gradients that may be in use: one that is updated, one on its way, and one of the piece before."""


@frozen(kw_only=True)
class Options:
    """`[optimize.early_update]`.

    threads  of the update during backward, on CPUs; None: as many as torch uses for a step
    """

    threads: Annotated[int, positive] | None = None


class Early(Stepper, Watcher):
    """As soon as a shard's gradient is final, a thread makes its update, as the engine expects it to be: with gradients
    that are finite and not clipped. New states are written beside the old ones and the new parameter to memory of its
    own. If the vote then wants just that, they take the place of the old ones; else they are forgotten, and the update
    is made as usual. So the result is that of plain training, bit for bit.

    stood   updates of shards so far that were made early and wanted
    redone  those that were made as usual

    Holds, beside everything else, one parameter of each shard; and its states a second time, where they rest.
    """

    expects = True

    def __init__(self, rule: Rule, layout: Layout, store: Store, options: Options, device: torch.device) -> None:
        self._rule, self._layout, self._store, self._device = rule, layout, store, device
        self._threads = options.threads or torch.get_num_threads()
        self._side = Side.of(device)
        self._walk, self._early = Walk(rule, layout, store), Walk(rule, layout, store)
        self._able: dict[Shard, Sequence[str]] = {}
        self._parameters: dict[Shard, Tensor] = {}
        self._job: Job | None = None
        self._queue: deque[Shard] = deque()
        self._made: set[Shard] = set()
        self._copies: deque[Tensor] = deque()
        self._lock = Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._busy = False
        self.stood = self.redone = 0

    def prepare(self) -> None:
        """When the states exist: take space for second values, and listen to the layout."""
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
        self._layout.watch(self)

    # ---- during backward

    def expect(self, job: Job) -> None:
        if self._job is not None and not all(self._fits(shard, job) for shard in self._able):
            self.forget()
        self._job = job

    def final(self, shard: Shard) -> None:
        if self._job is None or shard not in self._able:
            return
        if shard not in self._parameters:
            self._parameters[shard] = lasting(shard.stop - shard.start, shard.flat.dtype, self._device)
        self._side.follow()
        with self._lock:
            self._queue.append(shard)
            idle, self._busy = not self._busy, True
        if self._device.type == "meta":  # on paper nothing runs beside anything
            self._work()
        elif idle:
            self._worker = self._worker or ThreadPoolExecutor(
                1, "dsx-early", initializer=lambda: torch.set_num_threads(self._threads)
            )
            self._running = self._worker.submit(self._work)

    def revoked(self, shard: Shard) -> None:
        self._finish()
        if shard in self._made:
            self._made.remove(shard)
            self._store.forget(shard.key, self._able[shard])

    def _work(self) -> None:
        with torch.no_grad(), self._side.within():
            while True:
                with self._lock:
                    if not self._queue:
                        self._busy = False
                        return
                    shard, following = self._queue.popleft(), tuple(self._queue)
                self._update(shard, following)
                self._made.add(shard)

    def _update(self, shard: Shard, following: Sequence[Shard]) -> None:
        job, parameter = self._job, self._parameters[shard]
        assert job is not None
        some = not all(job.used)
        if "master" not in self._store.names(shard.key) or some:
            self._copy_parameter(shard)
        nothing = torch.zeros(0, len(job.used), dtype=torch.float64)
        self._store.aside(shard.key, self._able[shard])
        self._early.sweep(
            lambda piece, states: self._rule.update(piece, states, job, nothing),
            target=lambda part: parameter[slice(*part.span)],
            gradient=self._gradient,
            shards=[shard],
            following=following,
        )

    def _gradient(self, part: Part) -> Tensor:
        """A copy: the rule may overwrite it, and it is read again if the update is to be made as usual."""
        gradient = self._layout.gradient_of(part.piece.shard, part.span)
        room = self._copies.popleft() if len(self._copies) == COPIES else torch.empty(0, device=gradient.device)
        if room.dtype != gradient.dtype or room.numel() < gradient.numel():
            room = torch.empty_like(gradient)
        self._copies.append(room)
        return room[: gradient.numel()].copy_(gradient)

    def _copy_parameter(self, shard: Shard) -> None:
        """Take the parameter as it is: where it is itself what is updated, or not all of it is."""
        here, target = self._parameters[shard], self._layout.target(shard)
        if target is not None:
            here.copy_(target)
            return
        for part in self._early.parts_of(shard):
            self._store.fetch(shard.key, ["param"], into=here[slice(*part.span)], span=part.span)

    # ---- after the vote

    def settle(self) -> None:
        """Nothing is left over of an update that was made."""

    def start(self, job: Job) -> None:
        self._finish(begin=False)
        for stands, group in groupby(self._layout.shards, lambda shard: self._stands(shard, job)):
            shards = tuple(group)
            if stands:
                for shard in shards:
                    self._adopt(shard)
            else:
                self._make(job, shards)
        self._made.clear()
        self._job = None
        self._layout.reset()

    def forget(self) -> None:
        self._finish(begin=False)
        for shard in self._made:
            self._store.forget(shard.key, self._able[shard])
        self._made.clear()
        self._job = None

    def drain(self) -> None:
        self._finish()

    def close(self) -> None:
        self.forget()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def bytes(self) -> Mapping[str, int]:
        held = {"early param": self._parameters.values(), "early grad": self._copies}
        return {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in held.items()}

    def _finish(self, begin: bool = True) -> None:
        """Wait until the thread has nothing to do; unless it is to `begin` with what waits, that is dropped."""
        if not begin:
            with self._lock:
                self._queue.clear()
        running, self._running = self._running, None
        if running is not None:
            try:
                running.result()
            except BaseException:
                self._queue.clear()
                self._busy = False
                raise
        self._side.join()

    def _stands(self, shard: Shard, job: Job) -> bool:
        """Whether an update that was made is the one that is wanted; if not, it is forgotten."""
        if shard not in self._made:
            return False
        if self._fits(shard, job):
            return True
        self._store.forget(shard.key, self._able[shard])
        return False

    def _fits(self, shard: Shard, job: Job) -> bool:
        expected = self._job
        if expected is None or (expected.number, expected.multiplier) != (job.number, job.multiplier):
            return False
        segments = [part for part in shard.flat.segments if part.start < shard.stop and shard.start < part.stop]
        return all(
            expected.used[part.index] == job.used[part.index]
            and expected.steps[part.index] == job.steps[part.index]
            and expected.hypers[part.group] == job.hypers[part.group]
            for part in segments
        )

    def _adopt(self, shard: Shard) -> None:
        self.stood += 1
        self._store.keep(shard.key, self._able[shard])
        new, target = self._parameters[shard], self._layout.target(shard)
        if target is not None:
            target.copy_(new)
        else:
            for part in self._walk.parts_of(shard):
                self._store.fetch(shard.key, [], ["param"], span=part.span)["param"].copy_(new[slice(*part.span)])
                self._store.put(shard.key, dirty=["param"])
        self._layout.publish(shard)

    def _make(self, job: Job, shards: Sequence[Shard]) -> None:
        self.redone += len(shards)
        nothing = torch.zeros(0, len(job.used), dtype=torch.float64)
        self._walk.sweep(
            lambda piece, states: self._rule.update(piece, states, job, nothing),
            self._layout.publish,
            partial=not all(job.used),
            shards=shards,
        )


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
    summary="states in files are updated during backward, and the vote says whether that stands",
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
    return Early(rule, ctx.layout, ctx.store, options, ctx.plan.device)
