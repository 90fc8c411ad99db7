"""Parameters of 1/N: a unit's are gathered before it is used, forward and backward, and released after."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from dsx.contracts import Boundary, Flat, Scope, Shard, Unit
from dsx.plugin import Context
from dsx_zero.exchange import exchange
from dsx_zero.layout import MakeGradients, Sharded
from dsx_zero.passes import Passes
from dsx_zero.recall import Recall
from dsx_zero.residence import Residence

NONE: frozenset[int] = frozenset()
REMEMBERED = 8
"""Forwards whose backward may come; of more than these, the order of gathers is learnt anew."""


class Gathered(Sharded):
    """Traffic of k micro-batches: k reduce-scatters and 2 k all-gathers, less what stays live between a forward and its
    backward: the root unit, and the last one, whose backward comes first.

    depth      units gathered ahead of use
    permanent  numbers of the units that stay live, gathered once after each update
    """

    boundaries: frozenset[Boundary] = frozenset({"enter", "leave", "back", "exit"})

    def __init__(
        self,
        ctx: Context,
        units: Sequence[Unit],
        gradients: MakeGradients,
        depth: int,
        permanent: frozenset[int],
    ) -> None:
        super().__init__(ctx, units, gradients)
        self._model = ctx.model
        self.memory = Residence(
            self.units, self._transport, self._store, self._rank, self._world, self._device, want=self.want
        )
        self._words = self._transport.host()
        self.passes = Passes(self.memory, self._words, depth, self._passed_over)
        self.memory.permanent = permanent
        self._backward, self._stale = False, True
        self._recall = Recall(self.memory.owner, self._read_again)
        self._grad, self._regular = False, True
        self._forwards: deque[tuple[Hashable, Sequence[int]]] = deque(maxlen=REMEMBERED)
        self._roots = 0
        self._calls = [0] * len(self.units)

    def adopt(self, flat: Flat, exact: Tensor) -> None:
        self.memory.adopt(flat, exact)
        if flat.trainable:
            self.gradients.adopt(flat)

    # ---- forward

    def enter(self, unit: Unit) -> None:
        number = unit.index
        if not self._backward:
            if number == 0:
                self._roots += 1
            if not self.passes.open:
                self._begin_forward(torch.is_grad_enabled(), self._model.training)
            self._calls[number] += torch.is_grad_enabled()
        self._use(number)
        if not self._backward and torch.is_grad_enabled():
            self._recall.push(number)

    def leave(self, unit: Unit) -> None:
        if self._backward:
            return
        self._recall.pop(unit.index)
        self._done(unit.index)
        if unit.index == 0:
            self._roots -= 1
            if self._roots == 0:
                self._end_forward()

    def _begin_forward(self, grad: bool, training: bool) -> None:
        self._refresh()
        self._grad, kept = grad, self.passes.kept
        key = ("forward", grad, training, kept)
        there = kept | self.memory.permanent
        guess = [unit.index for unit in self.units if unit.flats and unit.index not in there]
        self.passes.begin(key, guess, lambda expected: kept | frozenset([0, *expected[-1:]]) if grad else kept)

    def _end_forward(self) -> None:
        self.passes.end()
        self.memory.busy.clear()
        self._regular = self._regular and self.passes.regular
        if self._grad:
            self._forwards.append((self.passes.key, self.passes.sequence))

    def absent(self) -> None:
        self._begin_forward(True, self._model.training)
        self._end_forward()

    # ---- backward

    def begin_backward(self, boundary: bool, scope: Scope, sync: bool = True) -> None:
        self.want()
        self._close()
        kept, forwards = self.passes.kept, self._forwards
        self._backward = True
        order = [number for _, sequence in forwards for number in sequence]
        guess = [number for number in reversed(order) if number not in kept]
        key = ("backward", kept, tuple(key for key, _ in forwards))
        last = forwards[-1][1][-1:] if forwards else ()
        self.passes.begin(key, guess, lambda expected: NONE, *(number for number in last if number in kept))
        forwards.clear()
        super().begin_backward(boundary, scope, sync)
        self.gradients.patient = not self._regular
        for number in kept:  # not gathered in this pass: nothing will say that they were skipped
            if self._calls[number] == 0:
                self._no_more(number)

    def back(self, unit: Unit) -> None:
        self._use(unit.index)

    def exit(self, unit: Unit) -> None:
        number = unit.index
        self._done(number)
        if self._backward:
            self._calls[number] -= 1
            if self._calls[number] <= 0:
                self._no_more(number)

    def end_backward(self) -> None:
        self._close()
        self._backward, self._regular = False, True
        self._forget()
        self._calls = [0] * len(self.units)
        super().end_backward()

    def _passed_over(self, number: int) -> None:
        """Its reductions must not hold up those of other units, which ranks that did not skip it wait for."""
        if self._backward:
            self._no_more(number)

    def _no_more(self, number: int) -> None:
        for flat in self.units[number].flats:
            if flat.trainable:
                self.gradients.reductions.give_up(flat.key)

    # ---- both

    def _use(self, number: int) -> None:
        self.memory.busy[number] = 1 if self._backward else self.memory.busy[number] + 1
        if not self.memory.live(number):
            self.passes.want(number)

    def _read_again(self, number: int) -> None:
        """Autograd reads a weight that it saved."""
        if not self.memory.live(number):
            self._use(number)

    def _done(self, number: int) -> None:
        self.memory.busy[number] = 0 if self._backward else max(0, self.memory.busy[number] - 1)
        self.passes.release(number)

    def _close(self) -> None:
        """End a pass that is open: of modules that were called outside the model's own forward."""
        if self.passes.open:
            self._roots = 0
            end = self.passes.end if self._backward else self._end_forward
            end()

    def bytes(self) -> Mapping[str, int]:
        """Whole units that are live count as buffers: the parameters are the store's."""
        held = dict(self.gradients.bytes())
        return {**held, "buffer": held.get("buffer", 0) + self.memory.bytes()}

    # ---- after an update

    def target(self, shard: Shard) -> None:
        """The new parameter is the store's."""

    def publish(self, shard: Shard) -> None:
        self._stale = self._stale or self.memory.filled(shard.flat)

    def settle(self) -> None:
        """Nothing travels until a unit is used."""
        self.want()

    def _refresh(self) -> None:
        """Forget weights that are not the last ones, and renew those that stay."""
        for number in self.memory.permanent:
            self.want(self.units[number])
        if self._stale:
            self._stale = False
            self._forget()
            for number in sorted(self.memory.permanent):
                self.memory.gather(number)
            for number in self.memory.permanent:
                self.memory.arrive(number)

    def _forget(self) -> None:
        """Release everything."""
        self.passes.kept = NONE
        self.memory.clear()

    # ---- whole weights

    def resting(self, flat: Flat) -> None:
        """The store's."""

    def uneven(self) -> AbstractContextManager[None]:
        return self.passes.uneven()

    @contextmanager
    def gathered(self, names: Sequence[str], modify: bool) -> Iterator[None]:
        wanted = set(names)
        units = [unit for unit in self.units if any(s.name in wanted for f in unit.flats for s in f.segments)]
        if not self.passes.open:
            self._refresh()
        if self.passes.alone:
            with self._wanted_alone(units):
                yield
            return
        there = exchange(self._words, [self.memory.live(unit.index) for unit in units], "admin")
        for unit, *live in zip(units, *there, strict=True):
            self.memory.pin(unit.index)
            if not all(live):
                self.memory.gather(unit.index, "admin")
                self.memory.arrive(unit.index)
        try:
            yield
            if modify:
                self._take_edits(units, wanted)
        finally:
            for unit in units:
                self.memory.unpin(unit.index)
                self.passes.release(unit.index)

    @contextmanager
    def _wanted_alone(self, units: Sequence[Unit]) -> Iterator[None]:
        """Where ranks need not do the same: a unit is asked for like any other."""
        for unit in units:
            self.memory.pin(unit.index)
            if not self.memory.live(unit.index):
                self.passes.want(unit.index)
        try:
            yield
        finally:
            for unit in units:
                self.memory.unpin(unit.index)
                self.passes.release(unit.index)

    def _take_edits(self, units: Sequence[Unit], names: set[str]) -> None:
        """Rank 0's edits become the weights: each rank takes its part of them."""
        for flat in (flat for unit in units for flat in unit.flats):
            edited = [segment for segment in flat.segments if segment.name in names]
            if not edited:
                continue
            whole, (start, stop) = self.memory.whole(flat), flat.part(self._rank, self._world)
            weights = [name for name in ("param", "master") if name in self._store.names(flat.key)]
            held = self._store.fetch(flat.key, weights)
            for segment in edited:
                part = whole[segment.start : segment.stop]
                self._transport.broadcast(part, channel="admin", purpose="state").wait()
                low, high = max(segment.start, start), min(segment.stop, stop)
                for name in weights if low < high else ():
                    held[name][low - start : high - start].copy_(whole[low:high])
            self._store.put(flat.key, weights)
