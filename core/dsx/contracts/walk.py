"""How a stepper walks the shards: piece by piece, what comes next being brought near while a piece is updated."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import chain

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts.crossing import Copy, Crossing, device_of
from dsx.contracts.data import Piece, Shard, State
from dsx.contracts.layout import Layout
from dsx.contracts.paused import Paused
from dsx.contracts.rule import Rule
from dsx.contracts.tier import Span, Store

AHEAD = 2
"""Pieces' worth of elements brought near beyond the one that is updated: one may be on its way while the next is read;
of small shards, more of them."""


@frozen(eq=False)
class Part:
    """A piece of the walk.

    names  of its shard's states in the store that a rule sees, the gradient apart
    last   whether it is its shard's last one
    """

    piece: Piece
    names: Sequence[str]
    last: bool

    @property
    def span(self) -> Span:
        """Where it lies in its shard."""
        begin = self.piece.shard.start
        return self.piece.start - begin, self.piece.stop - begin


Call = Callable[[Piece, Mapping[str, Tensor]], Iterator[object] | None]
Target = Callable[[Part], Tensor]


class Walk:
    """Walks a rule over a layout's shards, in their order.

    Shards whose states are far are cut into pieces of the size that their tiers want: at multiples of the rule's block,
    between parameters for a rule that takes them whole, not at all for one that communicates. Where a rule's states are
    on the host and the rest is not, the gradient of the next piece is on its way while one is updated.
    """

    def __init__(self, rule: Rule, layout: Layout, store: Store) -> None:
        self._rule, self._layout, self._store = rule, layout, store
        self._states = {state.name: state for state in rule.states}
        self._crossing = Crossing()

    @cached_property
    def parts(self) -> Sequence[Part]:
        """All pieces; known once every state exists."""
        return [part for shard in self._layout.shards for part in self._cut(shard)]

    def sweep(
        self,
        call: Call,
        done: Callable[[Shard], None] = lambda shard: None,
        *,
        target: Target | None = None,
        gradient: Callable[[Part], Tensor] | None = None,
        partial: bool = False,
        shards: Sequence[Shard] | None = None,
        following: Iterable[Shard] = (),
    ) -> None:
        """Give every piece to `call`, with its states; `done` follows the last piece of a shard.

        What `call` returns is what is left to do, which pauses where it waits for other ranks. Where all states are at
        hand the pieces after it begin meanwhile.

        target    memory of the caller's for the new parameter, which has the present one if there is no separate
                  master; the store's is not touched then. None: where the layout wants it
        gradient  None: the layout's
        partial   whether `call` may leave some of a parameter as it is: then it is read even if there is a master
        shards    those to walk; None: all
        following others, in the order in which later sweeps are likely to be of them; the next one is asked for when
                  there is nothing else to be brought near
        """
        apart = {name for name, given in (("param", target), ("grad", gradient)) if given is not None}
        gradient, place = gradient or self._gradient, target or self._target
        mine = self.parts if shards is None else list(self._each(shards))
        queue = chain(mine, self._each(following))
        near: deque[int] = deque()  # elements of the pieces that were brought near
        paused = Paused()
        coming: Mapping[str, Copy] = {}
        for number, part in enumerate(mine):
            if near:
                near.popleft()
            else:
                next(queue)
            while (not near or sum(near) < self._reach) and (later := next(queue, None)) is not None:
                self._bring(later, apart, partial)
                near.append(len(later.piece))
            names = [name for name in part.names if name not in apart]
            states = self._fetch(part, names, place(part), partial)
            states["grad"] = coming["grad"].source if coming else gradient(part)
            with self._crossing.together(states, coming) as there:
                crosses = there is not states and device_of(there).type == "cpu" and number + 1 < len(mine)
                coming = self._start(mine[number + 1], gradient, place) if crosses else {}
                rest = iter(call(part.piece, there) or ())
                if self._reach or there is not states:  # these make room for the next piece's
                    deque(rest, maxlen=0)
            paused.add(rest, functools.partial(self._over, part, names, done))
        paused.finish()

    def prepare(self, shards: Iterable[Shard]) -> None:
        """Bring near what later sweeps begin with, which are likely to be of these, gradients and parameters apart;
        twice as far as a sweep looks ahead, since meanwhile the disk has nothing else to do."""
        if not self._reach:  # nothing is far
            return
        reach = 0
        for part in self._each(shards):
            self._bring(part, {"param", "grad"}, partial=False)
            reach += len(part.piece)
            if reach >= 2 * self._reach:
                return

    def parts_of(self, shard: Shard) -> Sequence[Part]:
        """The pieces of one shard."""
        return self._by_shard[shard]

    def _each(self, shards: Iterable[Shard]) -> Iterator[Part]:
        for shard in shards:
            yield from self.parts_of(shard)

    @cached_property
    def _by_shard(self) -> Mapping[Shard, Sequence[Part]]:
        found: dict[Shard, list[Part]] = {}
        for part in self.parts:
            found.setdefault(part.piece.shard, []).append(part)
        return found

    def _over(self, part: Part, names: Sequence[str], done: Callable[[Shard], None]) -> None:
        self._store.put(part.piece.shard.key, dirty=names)
        if part.last:
            done(part.piece.shard)

    @cached_property
    def _reach(self) -> int:
        grains = [self._store.grain(shard.key) or 0 for shard in self._layout.shards]
        return AHEAD * max(grains, default=0)

    def _cut(self, shard: Shard) -> Iterator[Part]:
        names = [name for name in self._store.names(shard.key) if name != "grad"]
        stops = list(_stops(shard, self._store.grain(shard.key), self._rule))
        for start, stop in zip((shard.start, *stops), stops, strict=False):
            yield Part(Piece(shard, start, stop), names, stop == shard.stop)

    def _target(self, part: Part) -> Tensor | None:
        whole = self._layout.target(part.piece.shard)
        return None if whole is None else whole[slice(*part.span)]

    def _gradient(self, part: Part) -> Tensor:
        return self._layout.gradient_of(part.piece.shard, part.span)

    def _bring(self, part: Part, apart: Set[str], partial: bool) -> None:
        key, held = part.piece.shard.key, self._store.names(part.piece.shard.key)
        grad = ["grad"] if "grad" in held else []
        wanted = [name for name in (*self._read(part, partial), *grad) if name not in apart]
        for span, names in self._spans(part, wanted):
            self._store.prefetch(key, names, span)

    def _start(
        self, part: Part, gradient: Callable[[Part], Tensor], place: Callable[[Part], Tensor | None]
    ) -> Mapping[str, Copy]:
        """Start bringing a piece's gradient to the host, and its parameter where that is not the store's."""
        tensors = {"grad": gradient(part)}
        if (param := place(part)) is not None:
            tensors["param"] = param
        return self._crossing.bring(tensors, torch.device("cpu"))

    def _read(self, part: Part, partial: bool) -> list[str]:
        """A separate master is read; then a parameter that is written whole never has to be brought near."""
        separate = "master" in part.names and not partial
        return [name for name in part.names if not (separate and name == "param")]

    def _fetch(self, part: Part, wanted: Sequence[str], target: Tensor | None, partial: bool) -> dict[str, Tensor]:
        read = self._read(part, partial)
        states: dict[str, Tensor] = {}
        for span, names in self._spans(part, wanted):
            kept = [name for name in names if name in read]
            written = [name for name in names if name not in read]
            states |= self._store.fetch(part.piece.shard.key, kept, written, span=span)
        if target is not None:
            states["param"] = target
        states.setdefault("master", states["param"])
        return states

    def _spans(self, part: Part, names: Sequence[str]) -> Iterator[tuple[Span | None, Sequence[str]]]:
        """Which part of each state belongs to a piece: (span, names), None being all of it."""
        by_span: dict[Span | None, list[str]] = {}
        for name in names:
            by_span.setdefault(self._span(part, self._states.get(name)), []).append(name)
        yield from by_span.items()

    def _span(self, part: Part, state: State | None) -> Span | None:
        start, stop = part.span
        if part.last and start == 0:
            return None
        if state is None or (state.scope, state.shape) == ("shard", "element"):
            return start, stop
        if (state.scope, state.shape) == ("shard", "block"):
            return start // self._rule.block, stop // self._rule.block
        return None


def _stops(shard: Shard, grain: int | None, rule: Rule) -> Iterator[int]:
    """Where the pieces of a shard end, in flat coordinates."""
    if grain is None or rule.communicates or shard.start == shard.stop:
        yield shard.stop
        return
    if rule.whole:
        starts = [segment.start for segment in shard.flat.segments if shard.start < segment.start < shard.stop]
        at = shard.start
        for here, following in zip(starts, (*starts[1:], shard.stop), strict=False):
            if following - at > grain:
                yield here
                at = here
    else:
        each = max(1, grain // rule.block) * rule.block
        yield from range(shard.start + each, shard.stop, each)
    yield shard.stop
