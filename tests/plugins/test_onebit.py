"""`onebit_adam` against the algorithm of its paper, in float64; bytes, resume, layouts, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.contracts import Groups, Hyper
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing import CountingPlugin, check_plugin, distance, largest, refuses, weights_of
from dsx.testing.models import Tangle, tokens
from plugins.onebit_plain import Numbers
from plugins.onebit_plain import train as plain

STEPS = 8


def manifest(n: dict[str, Any], **more: Any) -> dict[str, Any]:
    clip = {"clip_norm": more.pop("clip_norm")} if "clip_norm" in more else {}
    return {"optimize": {"use": ["onebit_adam"], "onebit_adam": n, **clip}, **more}


def batch(step: int, micro: int, rank: int, side: str = "") -> tuple[Any, ...]:
    """`turns`: a branch that another rank takes in each step."""
    return (*tokens(step, micro, rank), side == "turns" and rank == step % 2)


def train(n: dict[str, Any], steps: int = STEPS, side: str = "", **more: Any) -> tuple[list[float], dict[str, Tensor]]:
    accumulation = more.get("batch", {}).get("accumulation", 1)
    engine = dsx.prepare(Tangle().double(), manifest(n, **more))
    losses = []
    for step in range(steps):
        report = engine.train_step(batch(step, micro, dist.get_rank(), side) for micro in range(accumulation))
        losses.append(report.loss)
    weights = weights_of(engine)
    engine.close()
    return losses, weights


@pytest.mark.parametrize(
    ("layout", "world", "signs", "accumulation", "clip_norm", "side"),
    [
        ("replicated", 2, "scaled", 1, None, ""),
        ("replicated", 3, "momentum", 1, None, ""),
        ("replicated", 3, "scaled", 2, 0.5, "turns"),
        ("replicated", 4, "momentum", 1, 0.5, "turns"),
        ("zero1", 2, "scaled", 2, None, ""),
        ("zero1", 3, "scaled", 1, 0.5, "turns"),
        ("zero1", 4, "scaled", 1, None, "turns"),
    ],
)
def test_the_papers_algorithm_in_float64(ranks, layout, world, signs, accumulation, clip_norm, side) -> None:
    """Tied, frozen, unused and empty parameters, a branch that ranks take in turns; padding has no part in scales."""
    n: dict[str, Any] = {"freeze": 3, "signs": signs, "lr": 3e-3, "betas": [0.9, 0.95]}
    more: dict[str, Any] = {"batch": {"accumulation": accumulation}}
    if layout == "zero1":
        more["partition"] = {"use": ["zero1"]}
    if clip_norm:
        more["clip_norm"] = clip_norm
    found = ranks.run(train, n, side=side, world=world, **more)
    model = Tangle().double()
    numbers = Numbers(
        freeze=3,
        signs=signs,
        lr=3e-3,
        betas=(0.9, 0.95),
        clip_norm=clip_norm or float("inf"),
        owned=layout == "zero1",
    )
    losses = plain(model, lambda *at: batch(*at, side), numbers, world=world, steps=STEPS, accumulation=accumulation)
    for each_losses, weights in found:
        assert all(torch.equal(tensor, found[0][1][name]) for name, tensor in weights.items()), "ranks differ"
        assert largest(each_losses, losses) < 1e-9
        assert distance(weights, weights_of(model)) < 1e-9


def test_an_empty_parameter_and_one_that_nobody_uses_stay_as_they_are_case_26(ranks) -> None:
    """No NaN, no decay."""
    start = dict(Tangle().double().named_parameters())
    for _, weights in ranks.run(train, {"freeze": 2, "lr": 0.1, "weight_decay": 0.5}, world=2):
        assert weights["empty"].numel() == 0
        assert torch.equal(weights["never"], start["never"])
        assert all(tensor.isfinite().all() for tensor in weights.values())


def steps_of(engine: dsx.Engine, steps: range) -> list[float | None]:
    return [engine.train_step([batch(step, 0, dist.get_rank())]).loss for step in steps]


def states_of(engine: dsx.Engine) -> dict[str, Tensor]:
    """Weights, the live parameters, and what this rank has of every state."""
    found = {f"weight/{name}": tensor.clone() for name, tensor in engine.weights()}
    found |= {f"live/{name}": parameter.detach().clone() for name, parameter in engine.model.named_parameters()}
    for state in engine.program.rule.states:
        for name, tensor in engine.program.layout.logical(state.name):
            found[f"{state.name}/{name}"] = tensor.clone()
    return found


def prepared(layout: str, precision: str, freeze: int | None, seed: int = 0) -> dsx.Engine:
    """`freeze` None: by the variance, which a small beta2 lets settle at update 12."""
    sections: dict[str, Any] = {"precision": {"use": [precision]}} if precision else {}
    if layout != "replicated":
        sections["partition"] = {"use": [layout]}
    options = {"lr": 3e-3, "betas": [0.9, 0.7], **({"freeze": freeze} if freeze else {})}
    return dsx.prepare(Tangle(seed=seed), manifest(options, clip_norm=1.0, **sections))


LAST = 14


def interrupted(layout: str, precision: str, freeze: int | None, at: list[int], path: str) -> list[str]:
    """Names of what differs, at the end, from a run that was not interrupted."""
    engine = prepared(layout, precision, freeze)
    losses = []
    for step in range(LAST):
        if step in at:
            engine.save(f"{path}/{step}")
        losses += steps_of(engine, range(step, step + 1))
    wanted = states_of(engine)
    assert engine.program.rule.scope(LAST + 1) == "local"
    different = []
    for step in at:
        again = prepared(layout, precision, freeze, seed=3)
        steps_of(again, range(1))
        again.load(f"{path}/{step}")
        assert steps_of(again, range(step, LAST)) == losses[step:], step
        found = states_of(again)
        different += [f"{step}: {name}" for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
        again.close()
    return different


@pytest.mark.parametrize(
    ("layout", "precision", "freeze"),
    [("replicated", "", 5), ("replicated", "bf16", None), ("zero1", "bf16", 5), ("zero1", "", None)],
)
def test_resumed_in_warm_up_at_the_freeze_and_after_it_goes_on_bit_for_bit_case_88(
    ranks, tmp_path: Path, layout: str, precision: str, freeze: int | None
) -> None:
    at = [3, 4, 5, 6, 9] if freeze else [3, 12, 13]
    for different in ranks.run(interrupted, layout, precision, freeze, at, str(tmp_path), world=2):
        assert different == []


def resized(path: str | None, out: str | None) -> dict[str, Tensor]:
    """Two updates after the freeze, then save; or load what was saved."""
    engine = prepared("replicated", "", 2, seed=0 if path is None else 5)
    if path is not None:
        engine.load(path)
    else:
        steps_of(engine, range(5))
    if out is not None:
        engine.save(out)
    found = states_of(engine)
    steps_of(engine, range(5, 7))
    engine.close()
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
def test_on_another_number_of_ranks_the_mean_of_the_error_feedback_goes_on(ranks, tmp_path: Path, world: int) -> None:
    before = ranks.run(resized, None, str(tmp_path / "saved"), world=3)
    after = ranks.run(resized, str(tmp_path / "saved"), None, world=world)
    for name, tensor in before[0].items():
        wanted = tensor
        if name.startswith("worker_error/"):
            wanted = torch.stack([found[name] for found in before]).double().mean(0).float()
        for found in after:
            assert torch.allclose(found[name], wanted, rtol=1e-6, atol=1e-7), name


def moved(layout: str, path: str | None, out: str | None) -> list[float | None]:
    """Losses of two compressed updates under a layout, after a checkpoint."""
    engine = prepared(layout, "", 2)
    if path is None:
        steps_of(engine, range(5))
    else:
        engine.load(path)
    if out is not None:
        engine.save(out)
    losses = steps_of(engine, range(5, 8))
    engine.close()
    return losses


def test_a_compressed_run_moves_to_zero1_and_back(ranks, tmp_path: Path) -> None:
    """The stage exchanges something else, so losses of about 11 are near, not the same; what each side lacks starts at
    zero."""
    first = ranks.run(moved, "replicated", None, str(tmp_path / "replicated"))[0]
    there = ranks.run(moved, "zero1", str(tmp_path / "replicated"), str(tmp_path / "zero1"))[0]
    back = ranks.run(moved, "replicated", str(tmp_path / "zero1"), None)[0]
    assert largest(there, first) < 0.2  # type: ignore[arg-type]
    assert largest(back, first) < 0.2  # type: ignore[arg-type]


class Wide(torch.nn.Module):
    """1.3 M parameters of usual shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(5))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + torch.tanh(block(inputs))
        return inputs.square().mean()


def sent(layout: str) -> tuple[dict[str, int], int, int]:
    """Bytes by purpose of a compressed update; elements with padding, and without."""
    sections = {"partition": {"use": [layout]}} if layout != "replicated" else {}
    tables = manifest({"freeze": 1}, communicate={"use": ["counting"]}, **sections)
    engine = dsx.prepare(Wide(), tables, plugins={"counting": CountingPlugin()})
    for _ in range(2):
        before = dict(engine.program.transport.bytes)  # type: ignore[attr-defined]
        engine.train_step([torch.ones(2, 512)])
    after = engine.program.transport.bytes  # type: ignore[attr-defined]
    padded = sum(shard.flat.size for shard in engine.program.layout.shards)
    engine.close()
    found = {purpose: count - before.get(purpose, 0) for purpose, count in after.items()}
    return found, padded, sum(parameter.numel() for parameter in engine.model.parameters())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["replicated", "zero1"])
def test_bytes_sent_are_the_formula_s(ranks, layout: str, world: int) -> None:
    """Two exchanges of one bit an element and 32 for each block; at most 1/30 of fp32's all-reduce, 1/15 of bf16's."""
    for found, padded, elements in ranks.run(sent, layout, world=world):
        each = padded // world
        assert found["rule"] == 2 * (world - 1) * (each // 8 + each // 1024 * 4)
        assert found["reduce"] == found.get("publish", 0) - found.get("publish", 0) == 0
        assert found["rule"] <= 2 * 4 * elements * (world - 1) / world / 30
        assert found["rule"] <= 2 * 2 * elements * (world - 1) / world / 15


class TwoGroups(Groups):
    """Vectors and numbers have another rate and no decay."""

    def assign(self, name: str, parameter: torch.nn.Parameter) -> str:
        return "small" if parameter.dim() < 2 else "large"

    def hypers(self, base: Hyper) -> dict[str, Hyper]:
        return {"large": base, "small": base.replace(lr=base.lr / 2, weight_decay=0.0, betas=(0.7, 0.9))}


class TwoGroupsPlugin:
    descriptor = Descriptor("two_groups", "optimize", 1, {"groups": Fill()}, None, "of a test")

    @hook
    def dsx_optimize(self) -> list[Part]:
        return [Part("groups", lambda ctx: TwoGroups())]


def grouped(use: list[str]) -> dict[str, Tensor]:
    tables: dict[str, Any] = {"optimize": {"use": use, "onebit_adam": {"freeze": 2, "lr": 3e-3}}}
    engine = dsx.prepare(Tangle().double(), tables, plugins={"two_groups": TwoGroupsPlugin()})
    steps_of(engine, range(6))
    weights = weights_of(engine)
    engine.close()
    return weights


def test_groups_have_their_own_numbers_after_the_freeze(ranks) -> None:
    one = ranks.run(grouped, ["onebit_adam"])[0]
    first, second = ranks.run(grouped, ["onebit_adam", "two_groups"])
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    start = {name: p.detach() for name, p in Tangle().double().named_parameters()}

    def walk(weights: dict[str, Tensor], name: str) -> float:
        return float((weights[name] - start[name]).abs().mean())

    small = [
        walk(first, name) / walk(one, name) for name in ("blocks.0.up.bias", "blocks.1.gain", "blocks.2.norm.bias")
    ]
    assert max(small) < 0.75 < walk(first, "blocks.0.up.weight") / walk(one, "blocks.0.up.weight")


def skipping(layout: str, precision: list[str]) -> list[str]:
    """Names of states that an update with a NaN on one rank changes, after the freeze."""
    sections: dict[str, Any] = {"precision": {"use": precision}} if precision else {}
    if "dynamic_loss_scale" in precision:
        sections["precision"]["dynamic_loss_scale"] = {"initial": 256.0}
    if layout != "replicated":
        sections["partition"] = {"use": [layout]}
    engine = dsx.prepare(Tangle(), manifest({"freeze": 2, "lr": 1e-3}, **sections))
    losses = steps_of(engine, range(4))
    before = states_of(engine)
    bad = float("nan") if dist.get_rank() == 0 else 1.0
    engine.backward(engine(*batch(9, 0, dist.get_rank())) * bad)
    report = engine.step()
    assert report.skipped and engine.steps == 4
    after = states_of(engine)
    changed = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    losses += steps_of(engine, range(4, 6))
    assert all(loss is not None and loss == loss for loss in losses)
    engine.close()
    return changed


@pytest.mark.parametrize(
    ("layout", "precision"), [("replicated", []), ("zero1", ["bf16"]), ("replicated", ["fp16", "dynamic_loss_scale"])]
)
def test_a_skipped_update_changes_no_error_feedback_cases_59_and_63(ranks, layout, precision) -> None:
    assert ranks.run(skipping, layout, precision) == [[], []]


def test_the_contract(ranks) -> None:
    """Before the freeze it is AdamW, on any number of ranks."""
    check_plugin("onebit_adam", {"lr": 3e-3}, ranks=ranks)


@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_sharded_gradients_are_refused_with_the_reason(stage: str) -> None:
    tables = manifest({}, partition={"use": [stage]})
    refuses(tables, "'onebit_adam' needs 'gradients.local'")
    refuses(tables, "it compresses each rank's own gradient, and this layout averages them first")
    refuses(tables, f"remove '{stage}' from [partition]")


def test_bad_options_are_refused_with_their_remedy() -> None:
    refuses(manifest({"block": 1000}), "block = 1000 is no multiple of 1024: take 1024")
    refuses(manifest({"signs": "moment"}), "momentum")
    refuses(manifest({"freeze": 0}), "above 0")
    tables = manifest({"signs": "momentum"}, partition={"use": ["zero1"]})
    refuses(tables, 'signs = "momentum" needs every rank to have the whole variance')


def test_a_plan_has_the_bytes_of_the_error_feedback() -> None:
    """Replicated: both moments and the worker's error whole, the owner's 1/N. zero1: what each rank must have whole."""
    for layout, whole, part in (("replicated", 3, 1), ("zero1", 3, 3)):
        sections = {"partition": {"use": [layout]}} if layout != "replicated" else {}
        found = dsx.forecast(Wide(), manifest({"freeze": 1}, **sections), batch=torch.ones(2, 512), world=4)
        states = {name: size for (_, name), size in found.rehearsal.states.items() if name not in ("param", "grad")}
        padded = 4 * 5 * (512 * 512 + 1024)
        padded = -(-padded // (4 * 4 * 1024)) * 4 * 4 * 1024
        assert sum(states.values()) == pytest.approx(padded * (whole + part / 4), rel=0.01)
        assert found.rehearsal.work.sent["rule"] < 2 * padded * 3 / 4 / 30


def other(path: str, at: int, options: dict[str, Any] | None) -> str:
    """What loading a run's checkpoint under another optimizer says."""
    engine = dsx.prepare(Tangle(), manifest({"freeze": 2}))
    steps_of(engine, range(at))
    engine.save(path)
    engine.close()
    tables = {"optimize": {"use": ["adamw"]}} if options is None else manifest(options)
    again = dsx.prepare(Tangle(), tables)
    try:
        again.load(path)
    except dsx.DsxError as error:
        return str(error)
    return ""


def test_states_of_the_compressed_phase_are_refused_by_another_optimizer(tmp_path: Path, ranks) -> None:
    """They are no moments of Adam any more; before the freeze they are."""
    assert ranks.run(other, str(tmp_path / "1"), 1, None, world=1) == [""]
    (text,) = ranks.run(other, str(tmp_path / "2"), 3, None, world=1)
    assert "are those of onebit_adam with signs of the scaled momentum, which no other can go on with" in text
    (text,) = ranks.run(other, str(tmp_path / "3"), 3, {"freeze": 2, "signs": "momentum"}, world=1)
    assert "resume with onebit_adam with signs of the scaled momentum, or start from the weights alone" in text
