"""What the tests of 1-bit rules have in common: data, models, and runs of any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.contracts import Groups, Hyper
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing import CountingPlugin, distance, largest, weights_of
from dsx.testing.models import Tangle, tokens

Plain = Callable[..., list[float]]


def manifest(rule: str, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """`more`: sections; `clip_norm`; `layout`, by its name."""
    clip = {"clip_norm": more.pop("clip_norm")} if more.get("clip_norm") else {}
    if (layout := more.pop("layout", "replicated")) != "replicated":
        more["partition"] = {"use": [layout]}
    more.pop("clip_norm", None)
    return {"optimize": {"use": [rule], rule: options, **clip}, **more}


def batch(step: int, micro: int, rank: int, side: str = "") -> tuple[Any, ...]:
    """`turns`: a branch that another rank takes in each step."""
    return (*tokens(step, micro, rank), side == "turns" and rank == step % 2)


def train(
    rule: str, options: dict[str, Any], steps: int, side: str = "", **more: Any
) -> tuple[list[float | None], dict[str, Tensor]]:
    """Losses and weights of the model of odd sizes in float64."""
    accumulation = more.get("batch", {}).get("accumulation", 1)
    engine = dsx.prepare(Tangle().double(), manifest(rule, options, **more))
    losses = []
    for step in range(steps):
        report = engine.train_step(batch(step, micro, dist.get_rank(), side) for micro in range(accumulation))
        losses.append(report.loss)
    weights = weights_of(engine)
    engine.close()
    return losses, weights


def assert_plain(
    found: Sequence[tuple[list[float | None], dict[str, Tensor]]], plain: Plain, numbers: Any, side: str, **more: Any
) -> None:
    """What `train` gave on every rank are the losses and weights of the same written plainly, and ranks do not differ.

    more  of `plain`
    """
    model = Tangle().double()
    losses = plain(model, lambda *at: batch(*at, side), numbers, **more)
    for each_losses, weights in found:
        assert all(torch.equal(tensor, found[0][1][name]) for name, tensor in weights.items()), "ranks differ"
        assert largest(each_losses, losses) < 1e-9
        assert distance(weights, weights_of(model)) < 1e-9


def across(rule: str, options: dict[str, Any], layout: str, path: str | None, out: str | None) -> list[float | None]:
    """Losses of three updates under a layout, after a checkpoint or five updates."""
    engine = dsx.prepare(Tangle(), manifest(rule, options, layout=layout))
    if path is None:
        steps_of(engine, range(5))
    else:
        engine.load(path)
    if out is not None:
        engine.save(out)
    losses = steps_of(engine, range(5, 8))
    engine.close()
    return losses


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


def interrupted(rule: str, options: dict[str, Any], at: list[int], last: int, path: str, **more: Any) -> list[str]:
    """Names of what differs, after `last` updates, from a run that was not interrupted after those of `at`."""

    def prepared(seed: int) -> dsx.Engine:
        return dsx.prepare(Tangle(seed=seed), manifest(rule, options, clip_norm=1.0, **more))

    engine = prepared(0)
    losses = []
    for step in range(last):
        if step in at:
            engine.save(f"{path}/{step}")
        losses += steps_of(engine, range(step, step + 1))
    wanted = states_of(engine)
    different = []
    for step in at:
        again = prepared(3)
        steps_of(again, range(1))
        again.load(f"{path}/{step}")
        assert steps_of(again, range(step, last)) == losses[step:], step
        found = states_of(again)
        different += [f"{step}: {name}" for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]
        again.close()
    return different


def resized(
    rule: str, options: dict[str, Any], steps: int, path: str | None, out: str | None, **more: Any
) -> dict[str, Tensor]:
    """States after some updates, which are saved; or of what was saved, loaded and trained on."""
    engine = dsx.prepare(Tangle(seed=0 if path is None else 5), manifest(rule, options, **more))
    if path is not None:
        engine.load(path)
    else:
        steps_of(engine, range(steps))
    if out is not None:
        engine.save(out)
    found = states_of(engine)
    steps_of(engine, range(steps, steps + 2))
    engine.close()
    return found


class Wide(torch.nn.Module):
    """1.3 M parameters of usual shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(512, 512) for _ in range(5))

    def forward(self, inputs: Tensor) -> Tensor:
        for block in self.blocks:
            inputs = inputs + torch.tanh(block(inputs))
        return inputs.square().mean()


def sent(rule: str, options: dict[str, Any], steps: int, **more: Any) -> list[dict[str, int]]:
    """Bytes by purpose of each update of `Wide`; before them its parameters, and elements with padding and without."""
    tables = manifest(rule, options, communicate={"use": ["counting"]}, **more)
    engine = dsx.prepare(Wide(), tables, plugins={"counting": CountingPlugin()})
    counted: Any = engine.program.transport
    padded = sum(shard.flat.size for shard in engine.program.layout.shards)
    sizes = [parameter.numel() for parameter in engine.model.parameters()]
    found = [{"padded": padded, "elements": sum(sizes), "parameters": len(sizes)}]
    for _ in range(steps):
        counted.reset()
        engine.train_step([torch.ones(2, 512)])
        found.append({purpose: count for purpose, count in counted.bytes.items() if count})
    engine.close()
    return found


def skipping(rule: str, options: dict[str, Any], steps: int, precision: list[str], **more: Any) -> list[str]:
    """Names of states that an update with a NaN on one rank changes, after so many."""
    sections: dict[str, Any] = {"precision": {"use": precision}} if precision else {}
    if "dynamic_loss_scale" in precision:
        sections["precision"]["dynamic_loss_scale"] = {"initial": 256.0}
    engine = dsx.prepare(Tangle(), manifest(rule, options, **sections, **more))
    losses = steps_of(engine, range(steps))
    before = states_of(engine)
    bad = float("nan") if dist.get_rank() == 0 else 1.0
    engine.backward(engine(*batch(9, 0, dist.get_rank())) * bad)
    report = engine.step()
    assert report.skipped and engine.steps == steps
    after = states_of(engine)
    changed = [name for name, tensor in before.items() if not torch.equal(after[name], tensor)]
    losses += steps_of(engine, range(steps, steps + 2))
    assert all(loss is not None and loss == loss for loss in losses)
    engine.close()
    return changed


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


def grouped(rule: str, options: dict[str, Any], steps: int, groups: bool) -> dict[str, Tensor]:
    """Weights, with two groups of hyperparameters or one."""
    tables: dict[str, Any] = {"optimize": {"use": [rule, *(["two_groups"] if groups else [])], rule: options}}
    engine = dsx.prepare(Tangle().double(), tables, plugins={"two_groups": TwoGroupsPlugin()})
    steps_of(engine, range(steps))
    weights = weights_of(engine)
    engine.close()
    return weights


def slower(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    """Vectors, which have half the rate in two groups, went less far than in one; matrices did not."""
    start = {name: parameter.detach() for name, parameter in Tangle().double().named_parameters()}

    def share(name: str) -> float:
        return float((two[name] - start[name]).abs().mean() / (one[name] - start[name]).abs().mean())

    assert max(map(share, ("blocks.0.up.bias", "blocks.1.gain", "blocks.2.norm.bias"))) < 0.75
    assert share("blocks.0.up.weight") > 0.75
