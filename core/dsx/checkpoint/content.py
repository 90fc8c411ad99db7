"""What of an engine is saved: logical tensors, a few numbers, random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from dsx.checkpoint.description import firsts, persistent_buffers
from dsx.checkpoint.lent import Loans, Values, of_state
from dsx.checkpoint.slices import Slice
from dsx.contracts import Flat, Segment, Shard, State, grid
from dsx.engine import Engine


@frozen
class Entry:
    """One logical tensor of a parameter, and this rank's part of it.

    state   "weight", or the name of a state
    name    of the parameter
    saved   the slice that this rank writes, None if others do
    held    all that this rank has of it, to be read into
    rank    whose own it is, of a state that each rank has for itself
    resize  what becomes of such a one on another number of ranks
    """

    state: str
    name: str
    saved: Slice | None
    held: Slice | None
    rank: int | None = None
    resize: str = ""

    @property
    def key(self) -> str:
        """Its name in the checkpoint."""
        return own_key(self.rank, self.state, self.name) if self.rank is not None else f"{self.state}/{self.name}"


def own_key(rank: int, state: str, name: str) -> str:
    """The name in a checkpoint of a state that is a rank's own."""
    return f"of_rank/{rank}/{state}/{name}"


class Content:
    """The tensors of an engine; what is read or written of them is borrowed from its store until `give_back`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._layout, self._store = engine.program.layout, engine.program.store
        self._rank, self._world = engine.program.transport.rank, engine.program.transport.world
        self._shards = {shard.flat: shard for shard in self._layout.shards}
        self._loans = Loans(self._store)

    def give_back(self, changed: bool) -> None:
        """Everything that is borrowed now."""
        self._loans.give_back(changed)

    def entries(self) -> Iterator[Entry]:
        """Every weight and state of every parameter, in the order of the model's units."""
        for unit in self._layout.units:
            for flat in unit.flats:
                shard = self._shards.get(flat)
                yield from self._frozen(flat) if shard is None else self._trained(flat, shard)

    def _frozen(self, flat: Flat) -> Iterator[Entry]:
        held, part = self._layout.resting(flat), flat.part(self._rank, self._world)
        if held is not None:
            yield from self._elements("weight", flat.segments, Values(held), 0, part)
        else:
            param = of_state(self._loans, flat.key, "param")
            yield from self._elements("weight", flat.segments, param, part[0], part)

    def _trained(self, flat: Flat, shard: Shard) -> Iterator[Entry]:
        yield from self._elements("weight", flat.segments, self._authoritative(shard), shard.start, shard.owned)
        for state in self._engine.program.rule.states:
            held, part = of_state(self._loans, flat.key, state.name), flat.part(self._rank, self._world)
            if state.scope == "rank":
                yield from self._own(flat, state, held)
            elif state.scope == "chunk":
                yield from self._shared(flat, state, held, part[0], part)
            else:
                yield from self._shared(flat, state, held, shard.start, shard.owned)

    def _authoritative(self, shard: Shard) -> Values:
        if "master" in self._store.names(shard.key):
            return of_state(self._loans, shard.key, "master")
        target = self._layout.target(shard)
        return of_state(self._loans, shard.key, "param") if target is None else Values(target)

    def _shared(self, flat: Flat, state: State, held: Values, start: int, owned: tuple[int, int]) -> Iterator[Entry]:
        """Entries of a state that is one logical tensor over all ranks; `held` begins at element `start`."""
        if state.shape == "segment":
            yield from self._numbers(flat, state, held, owned)
            return
        step, segments = self._grid(flat, state)
        owned = owned[0] // step, owned[1] // step
        yield from self._elements(state.name, segments, held, start // step, owned)

    def _elements(
        self, name: str, segments: Sequence[Segment], held: Values, start: int, owned: tuple[int, int]
    ) -> Iterator[Entry]:
        """Entries of a state with one number for each element; `held` begins at `start` of the flat parameter."""
        stop = start + held.size
        for segment in segments:
            saves = _slice(segment, held, start, max(owned[0], start), min(owned[1], stop))
            if segment.start == segment.stop:
                empty = Slice(Values(torch.empty(0, dtype=held.dtype)), 0, segment.shape)
                yield Entry(name, segment.name, empty if self._rank == 0 else None, empty)
            else:
                yield Entry(name, segment.name, saves, _slice(segment, held, start, start, stop))

    def _numbers(self, flat: Flat, state: State, held: Values, owned: tuple[int, int]) -> Iterator[Entry]:
        """Entries of a state with one number for each parameter; saved by whoever owns its first element."""
        for number, segment in enumerate(flat.segments):
            one = Slice(held.part(number, number + 1), 0, torch.Size(()))
            mine = owned[0] <= segment.start < owned[1] if segment.start < segment.stop else self._rank == 0
            yield Entry(state.name, segment.name, one if mine else None, one)

    def _own(self, flat: Flat, state: State, held: Values) -> Iterator[Entry]:
        """Entries of a state that this rank has for itself, over whole parameters."""
        _, segments = self._grid(flat, state)
        for number, segment in enumerate(segments):
            if state.shape == "segment":
                whole = Slice(held.part(number, number + 1), 0, torch.Size(()))
            else:
                whole = Slice(held.part(segment.start, segment.stop), 0, segment.shape)
            yield Entry(state.name, segment.name, whole, whole, self._rank, state.resize)

    def _grid(self, flat: Flat, state: State) -> tuple[int, Sequence[Segment]]:
        """How many elements have one number of a state together, and the parameters in such steps."""
        if state.shape != "block":
            return 1, flat.segments
        block = self._engine.program.rule.block
        return block, grid(flat, block)

    def buffers(self) -> dict[str, Tensor]:
        """Persistent buffers; they are local, and rank 0's are the ones saved."""
        found = firsts(persistent_buffers(self._engine.model))
        return {f"buffer/{name}": buffer.data for name, buffer in found.items()}


def _slice(segment: Segment, held: Values, start: int, low: int, high: int) -> Slice | None:
    """The part of a parameter within [low, high) of the flat parameter; None if there is none."""
    low, high = max(segment.start, low), min(segment.stop, high)
    if low >= high:
        return None
    return Slice(held.part(low - start, high - start), low - segment.start, segment.shape)


def numbers(engine: Engine) -> dict[str, Any]:
    """What an engine knows besides tensors, as JSON."""
    program = engine.program
    return {
        "steps": engine.steps,
        "skips": engine.skips,
        "counts": dict(zip(program.parameters, engine.counts, strict=True)),
        "scaler": dict(program.scaler.state()),
        "rule": dict(program.rule.state()),
    }


def restore_numbers(engine: Engine, kept: Mapping[str, Any]) -> None:
    """Continue from `numbers`; counters by parameter name, 0 for one that the checkpoint does not have."""
    program = engine.program
    engine.steps, engine.skips = kept["steps"], kept["skips"]
    engine.counts = [kept["counts"].get(name, 0) for name in program.parameters]
    if kept["scaler"]:
        program.scaler.load(kept["scaler"])
    if kept["rule"]:
        program.rule.load(kept["rule"])


def generators(device: torch.device) -> dict[str, Tensor]:
    """States of this rank's random generators: torch's, python's, the device's; uint8 or int64 [any]."""
    states = {"torch": torch.get_rng_state(), "python": _python_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: Mapping[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(states["torch"])
    version, *words, gauss = states["python"].tolist()
    random.setstate((version, tuple(words), None if gauss == 0 else _gauss(gauss)))
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)


def _python_state() -> Tensor:
    version, words, gauss = random.getstate()
    bits = 0 if gauss is None else int(torch.tensor(gauss, dtype=torch.float64).view(torch.int64).item())
    return torch.tensor([version, *words, bits], dtype=torch.int64)


def _gauss(bits: int) -> float:
    return float(torch.tensor(bits, dtype=torch.int64).view(torch.float64).item())
