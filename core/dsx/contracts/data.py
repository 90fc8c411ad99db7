"""What parts work on: units, flat parameters, shards, pieces, and the job of one update.

All of it is index arithmetic over frozen objects. A *flat parameter* lays the parameters of one unit, dtype and
`requires_grad` end to end in one buffer; a *segment* is one parameter in flat coordinates; a *shard* is the slice of a
flat parameter that a rank updates; a *piece* is what a rule is given at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn

from dsx.become import become

ALIGNMENT = 32
"""Elements at whose multiples parameters start in a flat one: 64 bytes in 16-bit, so that kernels meet aligned rows."""


@frozen
class Segment:
    """One parameter in flat coordinates.

    name   its first name in the model
    start  first element; a multiple of `ALIGNMENT` and of the rule's block
    stop   one past its last element; elements from here to the next segment are padding, zero in every state
    shape  its own shape
    group  the name of its hyperparameter group
    index  its number among the model's trainable parameters; -1 if frozen
    """

    name: str
    start: int
    stop: int
    shape: torch.Size
    group: str
    index: int

    def view(self, buffer: Tensor) -> Tensor:
        """This parameter's part of a buffer over the whole flat parameter, in its own shape."""
        return buffer[self.start : self.stop].view(self.shape)


@frozen(eq=False)
class Flat:
    """Parameters of one unit, one dtype and one `requires_grad`, end to end.

    key         names it in stores and messages, e.g. "blocks.3:float32"
    dtype       in which the parameters live
    source      dtype the model had them in
    trainable   whether its parameters require gradients
    segments    in order of `start`
    parameters  the model's own objects, one for each segment
    size        elements, padding included: a multiple of the data axis' size times `ALIGNMENT` and the rule's block
    """

    key: str
    dtype: torch.dtype
    source: torch.dtype
    trainable: bool
    segments: tuple[Segment, ...]
    parameters: tuple[nn.Parameter, ...]
    size: int

    def part(self, rank: int, world: int) -> tuple[int, int]:
        """The 1/world of it that `rank` owns, as (start, stop)."""
        each = self.size // world
        return rank * each, (rank + 1) * each

    def padding(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of what lies in no segment."""
        at = 0
        for segment in self.segments:
            if segment.start > at:
                yield at, segment.start
            at = segment.stop
        if self.size > at:
            yield at, self.size

    def attach(self, live: Tensor) -> None:
        """Make the model's parameters views of `live`: [size], of `dtype`."""
        for segment, parameter in zip(self.segments, self.parameters, strict=True):
            if parameter.device == live.device:
                parameter.data = segment.view(live)
            else:
                become(parameter, segment.view(live))


@frozen(eq=False)
class Unit:
    """Parameters gathered, reduced and released together: a block of the model, several small ones, or what is left
    around the blocks.

    index    its number, the root unit being 0
    name     the first module's name in the model, "" for the root
    modules  that hold its parameters, and use them in their forwards
    """

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    flats: tuple[Flat, ...]


@frozen(eq=False)
class Shard:
    """The slice [start, stop) of a flat parameter that this rank updates.

    owned  the 1/N of the flat parameter that this rank counts in sums over all ranks, and saves; equal to the shard
           where the optimizer is sharded
    """

    flat: Flat
    start: int
    stop: int
    owned: tuple[int, int]

    @property
    def key(self) -> str:
        return self.flat.key

    def piece(self) -> Piece:
        """All of it as one piece."""
        return Piece(self, self.start, self.stop)


@frozen
class Run:
    """Consecutive elements of a piece that are updated with the same numbers.

    where  slice in the piece's own coordinates
    hyper  hyperparameters of the group, schedule applied
    step   how many updates these parameters will have had, this one included
    index  number of the (first) parameter
    """

    where: slice
    hyper: Hyper
    step: int
    index: int

    def joins(self, other: Run) -> bool:
        """Whether `other` begins where this ends, with the same numbers."""
        return self.where.stop == other.where.start and (self.hyper, self.step) == (other.hyper, other.step)


@frozen(eq=False)
class Piece:
    """The slice [start, stop) of a flat parameter, in flat coordinates, given to a rule at once."""

    shard: Shard
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def runs(self, job: Job, merge: bool = True) -> Iterator[Run]:
        """The used parameters' elements in this piece, neighbours merged where nothing tells them apart.

        Without `merge`, one run for each parameter. Padding and unused parameters are in no run.
        """
        pending: Run | None = None
        for segment in self.shard.flat.segments:
            start, stop = max(segment.start, self.start) - self.start, min(segment.stop, self.stop) - self.start
            if start >= stop or not job.used[segment.index]:
                continue
            run = Run(slice(start, stop), job.hypers[segment.group], job.steps[segment.index], segment.index)
            if merge and pending and pending.joins(run):
                pending = evolve(pending, where=slice(pending.where.start, stop))
                continue
            if pending:
                yield pending
            pending = run
        if pending:
            yield pending

    def places(self) -> Iterator[tuple[int, Segment]]:
        """(number of the segment in its flat parameter, segment) of each parameter with elements in this piece."""
        for number, segment in enumerate(self.shard.flat.segments):
            if max(segment.start, self.start) < min(segment.stop, self.stop):
                yield number, segment


class Hyper(Mapping[str, Any]):
    """Hyperparameters of one group, frozen; `hyper.lr` is `hyper["lr"]`."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] = MappingProxyType({}), **more: Any) -> None:
        object.__setattr__(self, "_values", MappingProxyType({**values, **more}))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter '{name}' among {', '.join(self._values)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"hyperparameters are frozen; make a new one: hyper.replace({name}=...)")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hyper) and dict(self) == dict(other)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Hyper({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Hyper, (dict(self),)

    def replace(self, **values: Any) -> Hyper:
        """The same with some values changed."""
        return Hyper(self, **values)


@frozen(eq=False)
class Job:
    """One update, decided by the engine; parts keep it, nobody changes it.

    hypers      by group, schedule applied
    multiplier  what raw gradients are multiplied by: clip factor / loss scale / mean weight
    used        by parameter index: whether any rank had a gradient for it
    steps       by parameter index: its own number of updates, this one included (as torch counts)
    number      the engine's own number of this update, from 1
    """

    hypers: Mapping[str, Hyper]
    multiplier: float
    used: Sequence[bool]
    steps: Sequence[int]
    number: int


@frozen
class State:
    """A tensor that a rule keeps for each shard.

    name   not one of the core's own: param, grad, master
    dtype  None: that of the master weights
    shape  element: one number for each element; segment: one for each parameter; block: one for each `rule.block`
    scope  shard: one logical tensor, follows the layout; chunk: one logical tensor, 1/N on each rank under any layout;
           rank: each rank its own whole-length tensor
    resize how a state of scope `rank` moves to another world size: the `mean` of all, or `drop`
    """

    name: str
    dtype: torch.dtype | None = None
    shape: Literal["element", "segment", "block"] = "element"
    scope: Literal["shard", "chunk", "rank"] = "shard"
    resize: Literal["mean", "drop"] = "drop"


@frozen
class Report:
    """What one `engine.step()` did; the same on every rank.

    step        updates made so far, skipped ones not counted
    stepped     whether this call updated the weights
    skipped     whether it would have, but a gradient was not finite
    skips       skipped updates so far
    loss        mean over ranks and micro-batches of the window (by weight, if weights were given); None within a window
    norm        global gradient norm before clipping, loss scale removed; None within a window
    scale       the loss scale this window used
    multiplier  what gradients were multiplied by
    lr          learning rate by group; empty where nothing was updated
    words       sums over ranks of `Engine.words`; empty within a window
    """

    step: int
    stepped: bool
    skipped: bool = False
    skips: int = 0
    loss: float | None = None
    norm: float | None = None
    scale: float = 1.0
    multiplier: float = 0.0
    lr: Mapping[str, float] = field(factory=dict)
    words: Mapping[str, float] = field(factory=dict)
