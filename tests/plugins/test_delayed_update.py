"""The update one step behind, against the same written plainly; exact in checkpoints; refused where it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from built import HAS_NATIVE
from dsx.contracts import Job, Piece, Rule
from dsx.errors import CapabilityMissing, DsxError
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing import check_plugin, distance, largest, weights_of
from dsx.testing.models import Tangle, tokens
from dsx_offload.delayed_update import Options, descriptor

AFTER, STEPS, CLIP = 2, 6, 0.5
LAYOUTS = ("replicated", "zero1", "zero2", "zero3")


def prepare(layout: str, folder: str | None = None, **sections: Any) -> dsx.Engine:
    use = [] if layout == "replicated" else [layout]
    tiers = {} if folder is None else {"nvme_offload": {"path": folder, "piece_bytes": 4096}}
    if folder is not None and layout == "zero3":
        tiers["nvme_offload"]["states"] = ["optimizer", "grad", "param"]
    manifest = {
        "partition": {"use": [*use, *tiers], **tiers},
        "optimize": {
            "use": ["adamw", "delayed_update"],
            "clip_norm": CLIP,
            "adamw": {"lr": 1e-2},
            "delayed_update": {"after": AFTER},
        },
        **sections,
    }
    return dsx.prepare(Tangle(width=24).double(), manifest)


def train(layout: str, folder: str | None) -> tuple[list[float], dict[str, Tensor]]:
    engine = prepare(layout, folder)
    losses = [engine.train_step([tokens(step, 0, dist.get_rank())]).loss for step in range(STEPS)]
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.close()
    return losses, weights


def plainly(world: int) -> tuple[list[float], dict[str, Tensor]]:
    """Two models: the one that is updated, and the one that computes, which takes its weights over one update later."""
    ahead, model = Tangle(width=24).double(), Tangle(width=24).double()
    updated = [parameter for parameter in ahead.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(updated, lr=1e-2), []
    for step in range(STEPS):
        model.zero_grad()
        shares = [model(*tokens(step, 0, rank)) / world for rank in range(world)]
        total = torch.stack(shares).sum()
        total.backward()
        losses.append(total.item())
        computed = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for one, other in zip(updated, computed, strict=True):
            one.grad = None if other.grad is None else other.grad.clone()
        model.load_state_dict(ahead.state_dict())
        torch.nn.utils.clip_grad_norm_(updated, CLIP)
        optimizer.step()
        if step + 1 <= AFTER:
            model.load_state_dict(ahead.state_dict())
    return losses, {name: parameter.detach() for name, parameter in ahead.named_parameters()}


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_one_step_behind(ranks, tmp_path, layout, world) -> None:
    losses, weights = plainly(world)
    for folder in (None, str(tmp_path)) if HAS_NATIVE else (None,):
        for found, held in ranks.run(train, layout, folder, world=world):
            assert largest(found, losses) < 1e-9
            assert distance(held, weights) < 1e-9


def saved_and_resumed(layout: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint, of the run that wrote it and of the one that continues from it."""
    first = prepare(layout)
    for step in range(4):
        first.train_step([tokens(step, 0, dist.get_rank())])
    first.save(Path(folder) / "saved")
    second = prepare(layout)
    second.load(Path(folder) / "saved")
    losses: tuple[list[float], list[float]] = ([], [])
    for step in range(4, 7):
        for engine, seen in zip((first, second), losses, strict=True):
            seen.append(engine.train_step([tokens(step, 0, dist.get_rank())]).loss)
    first.close()
    second.close()
    return losses


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_checkpoint_has_what_was_under_way(ranks, tmp_path, layout) -> None:
    for one, other in ranks.run(saved_and_resumed, layout, str(tmp_path), world=2):
        assert one == other


def test_weights_that_are_read_or_edited_are_the_latest() -> None:
    engine = prepare("replicated")
    for step in range(4):
        engine.train_step([tokens(step, 0, 0)])
    name = next(iter(dict(engine.model.named_parameters())))
    before = dict(engine.weights())[name].clone()
    with torch.no_grad(), engine.gathered([name], modify=True):
        dict(engine.model.named_parameters())[name].fill_(0.25)
    assert not torch.equal(before, torch.full_like(before, 0.25))
    engine.train_step([tokens(4, 0, 0)])
    assert (dict(engine.weights())[name] - 0.25).abs().max() < 0.05
    engine.close()


def test_an_evaluation_is_of_the_latest_weights() -> None:
    engine = prepare("replicated")
    for step in range(STEPS):
        engine.train_step([tokens(step, 0, 0)])
    with engine.settled(), torch.no_grad():
        loss = engine(*tokens(90, 0, 0)).item()
    model = Tangle(width=24).double()
    model.load_state_dict({**model.state_dict(), **weights_of(engine)})
    assert loss == model(*tokens(90, 0, 0)).item()
    engine.close()


def test_an_update_that_fails_is_heard_of(monkeypatch) -> None:
    engine = prepare("replicated")
    for step in range(3):
        engine.train_step([tokens(step, 0, 0)])
    engine.quiesce()

    def fail(piece: Piece, states: Any, job: Job, sums: Tensor) -> None:
        raise DsxError("the disk is gone")

    monkeypatch.setattr(engine.program.rule, "update", fail)
    engine.train_step([tokens(3, 0, 0)])
    with pytest.raises(DsxError, match="the disk is gone"):
        engine.train_step([tokens(4, 0, 0)])


def test_plans_show_what_it_holds() -> None:
    manifest = {"optimize": {"use": ["adamw", "delayed_update"], "delayed_update": {"after": 0}}}
    model = Tangle(width=24)
    found = dsx.forecast(model, manifest, batch=tokens(0, 0, 0)).rehearsal.states
    engine = dsx.prepare(model, manifest)
    engine.train_step([tokens(0, 0, 0)])
    for name, size in engine.program.stepper.bytes().items():
        assert found["device", name] == size > 0
    engine.close()


class Talking(Rule):
    """A rule that sums over ranks."""

    sums = 1


@pytest.mark.parametrize(
    ("offers", "error", "words"),
    [
        ((), CapabilityMissing, "rule.silent"),
        (("rule.silent",), DsxError, "sums numbers over all ranks"),
    ],
)
def test_rules_that_communicate_are_refused(offers, error, words) -> None:
    class Plugin:
        descriptor = Descriptor(name="talking", section="optimize", contract=1, fills={"rule": Fill(offers=offers)})

        @hook
        def dsx_optimize(self) -> list[Part]:
            return [Part("rule", lambda ctx: Talking())]

    manifest = {"optimize": {"use": ["talking", "delayed_update"]}}
    with pytest.raises(error, match=words):
        dsx.prepare(Tangle(), manifest, plugins={"talking": Plugin()})


def test_it_keeps_its_contract(ranks) -> None:
    check_plugin("delayed_update", {"after": 1}, ranks=ranks)


def test_a_run_too_short_for_it_is_told_so() -> None:
    assert "delays nothing" in next(iter(descriptor.notes(Options(after=40), 40)))
    assert list(descriptor.notes(Options(after=40), 41)) == list(descriptor.notes(Options(), None)) == []
