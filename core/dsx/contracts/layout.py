"""Role `layout`: which rank holds which parameters, gradients and states, and what travels for it. One filler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch
from attrs import field, frozen
from torch import Tensor, nn

from dsx.contracts.data import Flat, Shard, Unit
from dsx.contracts.tier import Span

Boundary = Literal["enter", "leave", "back", "exit"]
Scope = Literal["mean", "local"]


@frozen(eq=False)
class Ballot:
    """A rank's part of the vote, to be summed over all ranks.

    squares  0-dim: sum of squares of final gradients, every element counted once over all ranks
    used     [parameters], 1.0 where this rank had a gradient
    words    [any], numbers of the layout's own; it gets their sums in `agreed`
    """

    squares: Tensor
    used: Tensor
    words: Tensor = field(factory=lambda: torch.zeros(0, dtype=torch.float64))


class Watcher(Protocol):
    """Hears of a layout, on the engine's thread: when gradients of a window's last backward are there, before the vote;
    and when parameters are about to be used, whose update may still be under way."""

    def final(self, shard: Shard) -> None:
        """`gradient_of` of this shard may be read, from any thread: the vote will be about these numbers, unless they
        are revoked."""

    def revoked(self, shard: Shard) -> None:
        """They are about to change after all; ignored for a shard whose gradient was not final."""

    def wanted(self, shard: Shard) -> None:
        """Its parameter is about to be used, or the memory of its gradient: on return no update of it is under way, and
        what came of one was published, in the order of `shards`."""


class Layout(Protocol):
    """What a layout promises, and its base class: boundaries that it does not want do nothing. Core's null part is
    `dsx.defaults.replicated.Replicated`.

    units       as cut at set-up
    shards      what this rank updates, in the fixed order
    boundaries  those of enter, leave, back, exit that it wants core to call, around every unit
    watcher     of `watch`, if any

    Owns the live parameters, the gradient buffers and their pools.
    """

    units: Sequence[Unit]
    shards: Sequence[Shard]
    boundaries: frozenset[Boundary]
    watcher: Watcher | None = None

    def adopt(self, flat: Flat, exact: Tensor) -> None:
        """Take a flat parameter's exact weights: [size], of `flat.source`; parameters become views of the live buffer.

        `exact` itself may be kept as the live buffer where the dtypes agree.
        """

    def enter(self, unit: Unit) -> None:
        """Forward is about to enter the unit; in backward, recomputation is: make it live and nothing else."""
        return

    def leave(self, unit: Unit) -> None:
        """Forward has left the unit."""
        return

    def back(self, unit: Unit) -> None:
        """The gradient of an output of the unit has arrived."""
        return

    def exit(self, unit: Unit) -> None:
        """The unit's input gradient is complete."""
        return

    def absent(self) -> None:
        """This rank has no data in a micro-batch: take part in what the others exchange in its forward."""
        return

    def begin_backward(self, boundary: bool, scope: Scope, sync: bool = True) -> None:
        """A backward starts.

        boundary  it is in the window's last micro-batch
        scope     whether gradients are averaged over ranks, or each rank keeps its own
        sync      False: keep gradients whole and reduce nothing, until a later backward or `finish` does
        """

    def gradient(self, key: str, number: int, parameter: nn.Parameter) -> None:
        """A gradient was accumulated in `parameter.grad`, segment `number` of a flat parameter: take and clear it."""

    def end_backward(self) -> None:
        """The backward is over: issue what is left, zeros for what was unused."""

    def watch(self, watcher: Watcher) -> None:
        """From now on tell `watcher`, where `gradients.early` is offered; once, before the model is connected.

        What is wanted: a unit's shards before a forward uses them, or anything reads them to bring them somewhere; all
        of them before a backward starts, and in `settle`.
        """
        self.watcher = watcher

    def want(self, unit: Unit | None = None) -> None:
        """Tell the watcher that a unit's shards are wanted, or all."""
        watcher = self.watcher
        if watcher is not None:
            for shard in self.shards:
                if unit is None or shard.flat in unit.flats:
                    watcher.wanted(shard)

    def finish(self) -> Ballot:
        """Wait for the window's final gradients and inspect them."""

    def agreed(self, used: Sequence[bool], words: Sequence[float]) -> bool:
        """What the vote said: which parameters any rank used, and the sums of `words`.

        True asks for another `finish` and vote; the answer is the same on all ranks.
        """

    def gradient_of(self, shard: Shard, span: Span | None = None) -> Tensor:
        """The final gradient [stop - start], or a part of it; scope local: this rank's own.

        Borrowed until it is asked for again for the same shard, or `reset`.
        """

    def local(self, shard: Shard) -> tuple[Tensor, Tensor]:
        """Scope local, where `gradients.local` is offered: this rank's own gradient of the whole flat parameter, and
        the whole live parameter, both [size]; here, those of a shard that is whole.

        The rule brings every rank's live parameter to the same new value by itself; nothing is published.
        """
        target = self.target(shard)
        assert target is not None, "parameters in the store are nobody's to write"
        return self.gradient_of(shard), target

    def target(self, shard: Shard) -> Tensor | None:
        """Where the parameter's new value is to be written before `publish`; None where `param` rests in the store."""

    def publish(self, shard: Shard) -> None:
        """The shard's new parameter is in its target: start bringing it to whoever needs it."""

    def settle(self) -> None:
        """Wait for everything published."""

    def reset(self) -> None:
        """Forget the gradients, after an update or a skip."""

    def total(self, vector: Tensor) -> Tensor:
        """Sum per-parameter numbers over the ranks that share a parameter; identity where parameters are whole."""

    def gathered(self, names: Sequence[str], modify: bool) -> AbstractContextManager[None]:
        """Whole parameters within the context; with `modify`, edits reach the authoritative weights."""

    def uneven(self) -> AbstractContextManager[None]:
        """Ranks may make different numbers of forwards within the context, and nothing is trained.

        Every gather within, of `gathered` too, is agreed on by all ranks; leaving the context serves the others until
        all have left. Nothing to do where forwards exchange nothing.
        """
        return nullcontext()

    def resting(self, flat: Flat) -> Tensor | None:
        """The weights of a frozen flat parameter [size], whole on every rank; None where the store holds this rank's
        1/N, as `param`."""

    def bytes(self) -> Mapping[str, int]:
        """Bytes held now beside the store's: `param` and `grad`, and `buffer` for what passes through."""

    def logical(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, whole tensor) of state `name` ("weight": the authoritative weights).

        In the parameter's own shape; 1-D for a state of one number for each block, 0-dim for one for each parameter.
        Of a state of scope `rank`, this rank's own.

        Entered by all ranks together; one parameter whole at a time.
        """
