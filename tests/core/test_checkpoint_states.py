"""States of every scope and shape: saved as logical tensors, and exact on any world size and layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.checkpoint.archive import Archive
from dsx.checkpoint.folder import load, save
from dsx.contracts import Hyper, Rule, State, Transport
from dsx.contracts.data import Job, Piece
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing import distance, largest
from dsx.testing.models import Tangle, tokens
from parity import LAYOUTS

BLOCK = 24
SHAPES, SCOPES = ("element", "segment", "block"), ("shard", "chunk", "rank")
NAMES = [f"{scope}_{shape}" for scope, shape in product(SCOPES, SHAPES)]


class Everything(Rule):
    """Momenta of every scope and shape, all of which move the weights; alike on any number of ranks."""

    block, communicates, hyper = BLOCK, True, Hyper(lr=0.01)

    def __init__(self, resize: str) -> None:
        self._transport = Transport()
        kinds: Any = product(SCOPES, SHAPES)
        self.states = [State(f"{o}_{a}", shape=a, scope=o, resize=resize) for o, a in kinds]  # type: ignore[arg-type]

    def bind(self, transport: Transport) -> None:
        self._transport = transport

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> None:
        flat, x = piece.shard.flat, self._transport
        inside = torch.zeros(flat.size, dtype=torch.bool)
        for segment in flat.segments:
            inside[segment.start : segment.stop] = job.used[segment.index]
        gradient = states["grad"] * job.multiplier * inside[piece.start : piece.stop]
        whole = gradient if len(piece) == flat.size else self._gathered(gradient)
        start, stop = flat.part(x.rank, x.world)
        for scope, (low, high) in {"shard": (piece.start, piece.stop), "chunk": (start, stop), "rank": (0, -1)}.items():
            mine = whole[low:high] if high >= 0 else whole
            states[f"{scope}_element"].mul_(0.9).add_(mine)
            states[f"{scope}_block"].mul_(0.9).add_(mine.view(-1, BLOCK).abs().mean(1))
            for number, segment in enumerate(flat.segments):
                if scope == "rank" or low <= segment.start < high:  # the others have no part in it
                    states[f"{scope}_segment"][number].mul_(0.5).add_(segment.index + 1)
        direction = sum(self._whole(name, piece, states) for name in NAMES) * inside
        states["master"].sub_(direction[piece.start : piece.stop], alpha=next(iter(job.hypers.values())).lr)
        if states["param"].data_ptr() != states["master"].data_ptr():
            states["param"].copy_(states["master"])

    def _whole(self, name: str, piece: Piece, states: Mapping[str, Tensor]) -> Tensor:
        """A state, one number for each element of the flat parameter."""
        scope, shape = name.split("_")
        flat, held = piece.shard.flat, states[name]
        parted = scope == "chunk" or (scope == "shard" and len(piece) < flat.size)
        whole = self._gathered(held) if parted else held
        if shape == "element":
            return whole
        if shape == "block":
            return whole.repeat_interleave(BLOCK)
        rows, each, out = whole.view(-1, len(flat.segments)), flat.size // self._transport.world, torch.zeros(flat.size)
        for number, segment in enumerate(flat.segments):
            owner = min(segment.start // each, len(rows) - 1) if parted else 0
            out[segment.start : segment.stop] = rows[owner, number] / 100
        return out

    def _gathered(self, part: Tensor) -> Tensor:
        whole = torch.empty(part.numel() * self._transport.world, dtype=part.dtype)
        self._transport.all_gather(whole, part.contiguous(), channel="rule", purpose="rule").wait()
        return whole


class Plugin:
    """The rule as a plugin, so that it can be sent to ranks."""

    def __init__(self, resize: str) -> None:
        self._resize = resize
        self.descriptor = Descriptor("everything", "optimize", 1, {"rule": Fill()}, None, "of a test")

    @hook
    def dsx_optimize(self, options: Any, plan: Any) -> Iterable[Part]:
        return [Part("rule", lambda ctx: Everything(self._resize), lambda rule, ctx: rule.bind(ctx.transport))]

    def __reduce__(self) -> tuple[Any, ...]:
        return Plugin, (self._resize,)


def prepare(layout: str, seed: int = 0, resize: str = "mean") -> dsx.Engine:
    partition = {} if layout == "replicated" else {"partition": {"use": [layout]}}
    manifest = {"optimize": {"use": ["everything"]}, **partition}
    return dsx.prepare(Tangle(layers=2, seed=seed).double(), manifest, plugins={"everything": Plugin(resize)})


def advance(engine: dsx.Engine, steps: Iterable[int]) -> list[float]:
    """Updates on the same twelve samples whatever the world size."""
    rank, world, losses = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        parts = [tokens(step, 0, part, 1) for part in range(rank * 12 // world, (rank + 1) * 12 // world)]
        loss = engine.train_step([(torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts]))]).loss
        assert loss is not None
        losses.append(loss)
    return losses


def everything(engine: dsx.Engine) -> dict[str, Tensor]:
    """Weights and states by name."""
    found = {f"weight/{name}": tensor.clone() for name, tensor in engine.weights()}
    for state in engine.program.rule.states:
        for name, tensor in engine.program.layout.logical(state.name):
            found[f"{state.name}/{name}"] = tensor.clone()
    return found


Seen = tuple[dict[str, Tensor], list[float], dict[str, Tensor]]
"""What was there at the checkpoint, the losses of two updates after it, what was there then."""


def saved(layout: str, path: str) -> Seen:
    engine = prepare(layout)
    advance(engine, range(3))
    engine.save(path)
    return everything(engine), advance(engine, range(3, 5)), everything(engine)


def resumed(layouts: Sequence[str], path: str) -> list[Seen]:
    """Under each layout, from another initialisation and with other states."""
    found = []
    for layout in layouts:
        engine = prepare(layout, seed=5)
        advance(engine, range(1))
        engine.load(path)
        found.append((everything(engine), advance(engine, range(3, 5)), everything(engine)))
        engine.close()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_state_moves_to_every_layout_and_world_size_case_73(ranks, tmp_path: Path, layout: str) -> None:
    """What is loaded has the same bits, and goes on alike."""
    before, losses, after = ranks.run(saved, layout, str(tmp_path / "checkpoint"), world=2)[0]
    assert all(tensor.count_nonzero() for name, tensor in before.items() if name.endswith("blocks.1.up.weight"))
    for world in (1, 2, 3, 4):
        first = LAYOUTS.index(layout) + world  # each pair of layouts on two world sizes
        layouts = [LAYOUTS[(first + more) % len(LAYOUTS)] for more in (0, 2)]
        for seen in ranks.run(resumed, layouts, str(tmp_path / "checkpoint"), world=world):
            for loaded, again, end in seen:
                assert loaded.keys() == before.keys()
                different = [name for name, tensor in before.items() if not torch.equal(loaded[name], tensor)]
                assert not different
                assert largest(again, losses) < 1e-12
                assert distance(end, after) < 1e-12


def test_states_have_the_shape_of_what_they_count_case_21(ranks, tmp_path: Path) -> None:
    """On the parameter's own grid of blocks, which ends where the parameter does; (1, 17) too."""
    ranks.run(saved, "zero2", str(tmp_path / "checkpoint"), world=2)
    shapes = {name: tuple(shape) for name, (shape, _) in Archive(tmp_path / "checkpoint").tensors.items()}
    assert shapes["shard_element/rows"] == (1, 17)
    assert shapes["chunk_block/rows"] == (1,)
    assert shapes["shard_block/embedding.weight"] == (-(-23 * 17 // BLOCK),)
    assert shapes["shard_block/empty"] == (0,)
    assert shapes["chunk_segment/rows"] == ()
    assert shapes["of_rank/1/rank_element/rows"] == (1, 17)
    assert shapes["of_rank/0/rank_block/blocks.0.gain"] == (1,)


def mark(engine: dsx.Engine, value: float) -> None:
    """Set this rank's own states."""
    store = engine.program.store
    for shard in engine.program.layout.shards:
        held = store.fetch(shard.key, [f"rank_{shape}" for shape in SHAPES])
        for tensor in held.values():
            tensor.fill_(value)
        store.put(shard.key, dirty=list(held))


def save_marked(layout: str, path: str, resize: str) -> None:
    engine = prepare(layout, resize=resize)
    mark(engine, float(dist.get_rank() ** 2))
    save(engine, Path(path))


def load_marked(layout: str, path: str, resize: str) -> tuple[set[float], tuple[str, ...]]:
    """The numbers that are in this rank's own states, and what people are told."""
    engine = prepare(layout, resize=resize)
    mark(engine, 100.0)
    notes = load(engine, Path(path)).notes
    own = {name: tensor for name, tensor in everything(engine).items() if name.startswith("rank_")}
    return {value for tensor in own.values() for value in tensor.view(-1).tolist()}, notes


@pytest.mark.parametrize("resize", ["mean", "drop"])
def test_a_state_of_each_ranks_own_becomes_its_mean_or_starts_anew(ranks, tmp_path: Path, resize: str) -> None:
    path = str(tmp_path / "checkpoint")
    ranks.run(save_marked, "zero3", path, resize, world=3)
    for rank, (numbers, notes) in enumerate(ranks.run(load_marked, "replicated", path, resize, world=3)):
        assert numbers == {float(rank**2)}
        assert not notes
    for world in (1, 2, 4):
        for numbers, notes in ranks.run(load_marked, "zero2", path, resize, world=world):
            assert numbers == ({(0.0 + 1.0 + 4.0) / 3} if resize == "mean" else {0.0})
            words = f"'rank_block' is each rank's own, of 3 ranks: on {world} it starts anew"
            assert (words in notes) == (resize == "drop")
