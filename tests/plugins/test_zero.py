"""ZeRO stages: bytes held and sent equal the formulas; contracts kept; what cannot be is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dsx
from dsx.contracts import Rule
from dsx.plugin import Descriptor, Fill, Need, Part, hook
from dsx.testing import CountingPlugin, check_plugin, refuses
from dsx.testing.models import Tangle, tokens

STAGES = ("zero1", "zero2", "zero3")


@pytest.mark.parametrize("stage", STAGES)
def test_it_keeps_its_contract(ranks, stage: str) -> None:
    check_plugin(stage, ranks=ranks)


def held(stage: str, bf16: bool, accumulation: int) -> dict[str, int]:
    """Bytes on this rank after a step: parameters, gradients, states of the store; and elements of all flats."""
    manifest: dict[str, Any] = {"batch": {"accumulation": accumulation}}
    if stage != "replicated":
        manifest["partition"] = {"use": [stage]}
    if bf16:
        manifest["precision"] = {"use": ["bf16"]}
    model = Tangle(width=64)
    model.frozen.requires_grad_(True)
    engine = dsx.prepare(model, manifest)
    engine.train_step([tokens(0, micro, dist.get_rank()) for micro in range(accumulation)])
    layout = engine.program.layout
    flats = [flat for unit in layout.units for flat in unit.flats]
    assert all(flat.trainable for flat in flats)
    states, beside = dict(engine.program.store.bytes()), dict(layout.bytes())
    return {
        "elements": sum(flat.size for flat in flats),
        "param": beside.get("param", 0) + states.pop("param", 0),
        "grad": beside.get("grad", 0) + states.pop("grad", 0),
        "buffer": beside.get("buffer", 0),
        "pool": sum(min(count, 3) * size for size, count in Counter(flat.size for flat in flats).items()),
        "optimizer": sum(states.values()),
    }


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("stage", "bf16", "accumulation", "whole", "sharded"),
    [
        # bytes for each parameter of (param, grad, optimizer), whole on a rank or 1/N; several micro-batches: fp32 sums
        ("replicated", False, 1, (4, 4, 8), (0, 0, 0)),
        ("zero1", False, 1, (4, 4, 0), (0, 0, 8)),
        ("zero1", True, 1, (2, 2, 0), (0, 0, 12)),
        ("zero1", True, 2, (2, 4, 0), (0, 0, 12)),
        ("zero2", False, 1, (4, 0, 0), (0, 4, 8)),
        ("zero2", True, 1, (2, 0, 0), (0, 2, 12)),
        ("zero2", True, 3, (2, 0, 0), (0, 4, 12)),
        ("zero3", False, 1, (0, 0, 0), (4, 4, 8)),
        ("zero3", True, 1, (0, 0, 0), (2, 2, 12)),
        ("zero3", True, 3, (0, 0, 0), (2, 4, 12)),
    ],
)
def test_bytes_held_are_the_table_s(ranks, world, stage, bf16, accumulation, whole, sharded) -> None:
    for found in ranks.run(held, stage, bf16, accumulation, world=world):
        elements = found["elements"]
        for kind, all_of_it, part in zip(("param", "grad", "optimizer"), whole, sharded, strict=True):
            assert found[kind] == all_of_it * elements + part * elements // world, kind
        item = 2 if bf16 and accumulation == 1 else 4
        pooled = item * found["pool"] if stage in ("zero2", "zero3") else 0
        assert found["buffer"] <= pooled, "whole gradients: two under way, one being filled"


def sent(stage: str, accumulation: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes sent by this rank in one update, by purpose; and the elements reduced and gathered in a micro-batch."""
    manifest: dict[str, Any] = {"batch": {"accumulation": accumulation}, "communicate": {"use": ["counting"]}}
    if stage != "replicated":
        manifest["partition"] = {"use": [stage]}
    engine = dsx.prepare(Tangle(width=64), manifest, plugins={"counting": CountingPlugin()})
    rank = dist.get_rank()
    engine.train_step([tokens(0, micro, rank) for micro in range(accumulation)])  # the first shares an order
    before = dict(engine.program.transport.bytes)
    engine.train_step([tokens(1, micro, rank) for micro in range(accumulation)])
    after = engine.program.transport.bytes
    sizes = [sum(flat.size for flat in unit.flats) for unit in engine.program.layout.units]
    elements = {
        "trained": sum(shard.flat.size for shard in engine.program.layout.shards),
        "gathered": 2 * sum(sizes) - sizes[0] - sizes[-1],  # the root and the last unit stay from forward to backward
    }
    return {purpose: after[purpose] - before.get(purpose, 0) for purpose in ("reduce", "publish", "gather")}, elements


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("stage", ["replicated", *STAGES])
def test_bytes_sent_are_the_formula_s(ranks, stage: str, world: int, accumulation: int) -> None:
    """Relative to one all-reduce: zero1 1, zero2 (k + 1)/2, zero3 3/2 k less what stays."""
    for found, elements in ranks.run(sent, stage, accumulation, world=world):
        part = 4 * elements["trained"] * (world - 1) // world
        reductions = {"replicated": 2, "zero1": 1, "zero2": accumulation, "zero3": accumulation}[stage]
        publications = 1 if stage in ("zero1", "zero2") else 0
        gathers = accumulation * 4 * elements["gathered"] * (world - 1) // world if stage == "zero3" else 0
        assert found == {"reduce": reductions * part, "publish": publications * part, "gather": gathers}


class Local(Rule):
    """Wants each rank's own gradients."""


class LocalPlugin:
    descriptor = Descriptor(
        name="local",
        section="optimize",
        contract=1,
        fills={"rule": Fill(needs=[Need("gradients.local", "it compresses each rank's own gradient")])},
        summary="of a test",
    )

    @hook
    def dsx_optimize(self) -> list[Part]:
        return [Part("rule", lambda ctx: Local())]


def test_a_rule_that_needs_local_gradients_is_refused_where_they_are_sharded() -> None:
    manifest = {"optimize": {"use": ["local"]}, "partition": {"use": ["zero2"]}}
    refuses(manifest, "'local' needs 'gradients.local'", {"local": LocalPlugin()})
    refuses(manifest, "remove 'zero2' from [partition]", {"local": LocalPlugin()})


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_of_one_row_on_four_ranks(ranks, stage: str) -> None:
    """Cases 21, 23 and 25: (1, 17) on more ranks than rows; padding is zero in weights and states."""
    for padding, rows in ranks.run(one_row, stage, world=4):
        assert padding == 0
        assert rows == (1, 17)


def one_row(stage: str) -> tuple[float, tuple[int, ...]]:
    engine = dsx.prepare(Tangle(), {"partition": {"use": [stage]}})
    for step in range(3):
        engine.train_step([tokens(step, 0, dist.get_rank())])
    padding = 0.0
    for shard in engine.program.layout.shards:
        inside = torch.zeros(shard.flat.size, dtype=torch.bool)
        for segment in shard.flat.segments:
            inside[segment.start : segment.stop] = True
        names = [name for name in engine.program.store.names(shard.key) if name != "grad"]
        states = engine.program.store.fetch(shard.key, names)
        target = engine.program.layout.target(shard)
        states |= {} if target is None else {"param": target}
        outside = ~inside[shard.start : shard.stop]
        padding += sum(state[outside].abs().sum().item() for state in states.values())
        engine.program.store.put(shard.key, clean=names)
    return padding, tuple(dict(engine.weights())["rows"].shape)


def overlapped(stage: str) -> list[bool]:
    """With `run.overlap_publish` a forward waits for the units it enters, and sees what a step that waited would."""
    same = []
    engines = [
        dsx.prepare(Tangle(), {"partition": {"use": [stage]}, "run": {"overlap_publish": overlap}})
        for overlap in (False, True)
    ]
    for step in range(5):
        losses = [engine.train_step([tokens(step, 0, dist.get_rank())]).loss for engine in engines]
        same.append(losses[0] == losses[1])
    return same


@pytest.mark.parametrize("stage", STAGES)
def test_publishing_behind_the_next_forward_changes_nothing(ranks, stage: str) -> None:
    for found in ranks.run(overlapped, stage, world=3):
        assert found == [True] * 5


def across(path: str, stage: str, load: bool) -> dict[str, torch.Tensor]:
    manifest = {"partition": {"use": [stage]}} if stage != "replicated" else {}
    engine = dsx.prepare(Tangle(seed=3 if load else 0).double(), manifest)
    if load:
        engine.load(path)
    else:
        for step in range(3):
            engine.train_step([tokens(step, 0, 0)])
        engine.save(path)
    engine.train_step([tokens(9, 0, 0)])
    return {name: tensor.clone() for name, tensor in engine.weights()}


@pytest.mark.parametrize("wrote", ["zero2", "zero3"])
def test_a_checkpoint_fits_every_stage_and_world_size(ranks, tmp_path, wrote: str) -> None:
    path = str(tmp_path / "checkpoint")
    first = ranks.run(across, path, wrote, False, world=2)[0]
    for stage, world in (("zero3", 3), ("zero1", 3), ("replicated", 1), ("zero2", 4), ("zero1", 2), ("zero3", 1)):
        for weights in ranks.run(across, path, stage, True, world=world):
            for name, tensor in first.items():
                assert (weights[name] - tensor).abs().max() < 1e-12 if tensor.numel() else True, (stage, world, name)
