"""Every layout on the kinds of models that people train, on 1 to 4 ranks, against one plain PyTorch process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn

import dsx
from dsx.contracts import Job, Piece
from dsx.defaults.adamw import AdamW
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing import distance, largest, weights_of
from parity import LAYOUTS
from zoo import KINDS, Batch, Kind

pytest.importorskip("transformers")

STEPS = 10
TRAINED = ("gpt", "mlp", "convolution", "sequences", "llama", "gpt2 recomputed", "t5")
Tensors = dict[str, Tensor]


@frozen
class Mode:
    """In which precision a model is trained.

    dtype         of the model as it is built
    half          it computes in bf16, its masters staying in `dtype`
    accumulation  micro-batches of an update: bf16 gradients of several add up in fp32, as plain PyTorch's do
    """

    dtype: torch.dtype
    half: bool = False
    accumulation: int = 1


MODES = {"fp64": Mode(torch.float64), "fp32": Mode(torch.float32), "bf16": Mode(torch.float32, True, 2)}


@frozen
class Outcome:
    """losses, gradients (flat; on a rank the part that it updates, zeros elsewhere), weights and buffers."""

    losses: list[float]
    gradients: list[Tensors]
    weights: Tensors
    buffers: Tensors


class Recorder(AdamW):
    """AdamW that keeps the gradients it is given."""

    def __init__(self) -> None:
        self.steps: list[Tensors] = []

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> None:
        if len(self.steps) < job.number:
            self.steps.append({})
        segments = {segment.index: segment for _, segment in piece.places()}
        for run in piece.runs(job, merge=False):
            segment = segments[run.index]
            whole = self.steps[-1].setdefault(segment.name, torch.zeros(segment.stop - segment.start).double())
            start = piece.start + run.where.start - segment.start
            gradient = states["grad"][run.where].double() * job.multiplier
            whole[start : start + gradient.numel()] = gradient
        super().update(piece, states, job, sums)


class RecorderPlugin:
    descriptor = Descriptor(
        name="recorder", section="optimize", contract=1, fills={"rule": Fill()}, summary="AdamW that keeps gradients"
    )

    @hook
    def dsx_optimize(self) -> list[Part]:
        return [Part("rule", lambda ctx: Recorder())]


def floats(batch: Batch, dtype: torch.dtype) -> Batch:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


def train(kind: Kind, mode: Mode, layout: str) -> Outcome:
    """One rank's run under dsx."""
    model, rank = kind.make().to(mode.dtype), dist.get_rank()
    manifest: dict[str, Any] = {"batch": {"accumulation": mode.accumulation}, "optimize": {"use": ["recorder"]}}
    if layout != "replicated":
        manifest["partition"] = {"use": [layout]}
    if mode.half:
        manifest["precision"] = {"use": ["bf16"]}
    engine = dsx.prepare(model, manifest, plugins={"recorder": RecorderPlugin()})
    losses = []
    for step in range(STEPS):
        for micro in range(mode.accumulation):
            engine.backward(engine(**floats(kind.batch(step, micro, rank), mode.dtype)))
            report = engine.step()
        losses.append(report.loss or 0.0)
    gradients: list[Tensors] = engine.program.rule.steps  # type: ignore[attr-defined]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outcome = Outcome(losses, gradients if mode.dtype == torch.float64 else [], weights_of(engine), buffers)
    engine.close()
    return outcome


def train_all(mode: str, layout: str) -> dict[str, Outcome | str]:
    """All kinds in one call, each an outcome or a traceback: a process group for each would take longer."""
    outcomes: dict[str, Outcome | str] = {}
    for name in TRAINED:
        try:
            outcomes[name] = train(KINDS[name], MODES[mode], layout)
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


@cache
def plain(name: str, mode_name: str, order: Sequence[int]) -> tuple[Outcome, list[Tensors]]:
    """The same without dsx: the ranks' micro-batches in this order, each with the rank's own buffers."""
    kind, mode, world = KINDS[name], MODES[mode_name], len(order)
    model = kind.make().to(mode.dtype)
    live = dict(model.named_parameters())
    masters = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in live.items()}
    if mode.half:
        _halve(model)
    buffers = [{name: buffer.clone() for name, buffer in model.named_buffers()} for _ in order]
    optimizer = torch.optim.AdamW(masters.values(), fused=True)
    losses, gradients = [], []
    for step in range(STEPS):
        total = 0.0
        for micro in range(mode.accumulation):
            for rank in order:
                _copy(dict(model.named_buffers()), buffers[rank])
                batch = floats(kind.batch(step, micro, rank), torch.bfloat16 if mode.half else mode.dtype)
                loss = model(**batch)["loss"]
                (loss / mode.accumulation).backward()
                total += loss.item() / (mode.accumulation * world)
                _collect(live, masters, world)
                _copy(buffers[rank], dict(model.named_buffers()))
        gradients.append({name: m.grad.flatten().double() for name, m in masters.items() if m.grad is not None})
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
        _copy(live, masters)
    weights = {name: master.detach() for name, master in masters.items()}
    return Outcome(losses, gradients, weights, {}), buffers


def _halve(model: nn.Module) -> None:
    """As mixed precision does: all but the norms whose statistics need more bits."""
    kept = {id(p) for module in model.modules() if isinstance(module, nn.BatchNorm1d) for p in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in kept:
            parameter.data = parameter.data.bfloat16()


def _copy(into: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in source.items():
            into[name].copy_(tensor)


def _collect(live: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter], world: int) -> None:
    for name, parameter in live.items():
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            share = gradient.to(masters[name].dtype) / world
            held = masters[name].grad
            masters[name].grad = share if held is None else held + share


Runs = Callable[[str, str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def runs(ranks) -> Runs:
    """(mode, layout, world) -> what each rank's runs came to, by kind."""
    return cache(lambda mode, layout, world: ranks.run(train_all, mode, layout, world=world, timeout=120))


def outcomes(runs: Runs, mode: str, layout: str, world: int, kind: str) -> list[Outcome]:
    found = [rank[kind] for rank in runs(mode, layout, world)]
    for outcome in found:
        assert isinstance(outcome, Outcome), outcome
        assert outcome.losses == found[0].losses
        assert all(torch.equal(tensor, found[0].weights[name]) for name, tensor in outcome.weights.items())
    return found


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_and_weight_in_fp64(runs: Runs, layout: str, world: int, kind: str) -> None:
    found = outcomes(runs, "fp64", layout, world, kind)
    expected, buffers = plain(kind, "fp64", range(world))
    assert distance(found[0].weights, expected.weights) < 1e-9
    parts = [found[0]] if layout == "replicated" else found
    for step, gradients in enumerate(expected.gradients):
        assert whole(parts, step).keys() == gradients.keys()
        assert relative(whole(parts, step), gradients) < 1e-9, step
    for outcome, theirs in zip(found, buffers, strict=True):
        assert distance(outcome.buffers, theirs) < 1e-9


def whole(parts: Sequence[Outcome], step: int) -> Tensors:
    """Gradients of all ranks' parts together."""
    names = dict.fromkeys(name for part in parts for name in part.gradients[step])
    return {name: sum(part.gradients[step].get(name, torch.zeros(())) for part in parts) for name in names}  # type: ignore[misc]


def relative(found: Tensors, expected: Tensors) -> float:
    """The largest |a - b| / |b|; |b| counts as a thousandth of all gradients' norm at least, for those that are 0."""
    least = 1e-3 * torch.cat(list(expected.values())).norm().item()
    return max(((found[n] - b).norm() / max(b.norm().item(), least)).item() for n, b in expected.items())


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_in_fp32(runs: Runs, layout: str, world: int, kind: str) -> None:
    found = outcomes(runs, "fp32", layout, world, kind)
    expected, _ = plain(kind, "fp32", range(world))
    assert largest(found[0].losses, expected.losses) < 1e-6


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_in_bf16_differ_no_more_than_plain_pytorch_s_own(runs: Runs, layout: str, kind: str) -> None:
    """Whose losses depend on the order in which gradients of ranks are added up."""
    found = outcomes(runs, "bf16", layout, 3, kind)
    several = [plain(kind, "bf16", order)[0] for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (2, 0, 1))]
    spread = max(largest(one.losses, other.losses) for one in several for other in several)
    assert min(largest(found[0].losses, one.losses) for one in several) < max(1e-6, spread)
