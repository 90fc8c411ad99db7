"""Updates during backward, which the vote may undo: the same bits as without, whatever becomes of the vote."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from built import needs_native
from dsx.contracts import Job, Piece, Rule, State, Walk
from dsx.errors import DsxError
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing import check_plugin
from dsx.testing.models import Tangle, tokens

pytestmark = needs_native

LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
STATES = {
    "replicated": [("optimizer",)],
    "zero1": [("optimizer",)],
    "zero2": [("optimizer",), ("optimizer", "grad")],
    "zero3": [("optimizer",), ("optimizer", "grad", "param")],
}
STEPS = 5


def prepare(
    layout: str, folder: str, early: bool, states: tuple[str, ...] = ("optimizer",), **sections: Any
) -> dsx.Engine:
    disk = {"path": folder, "piece_bytes": 4096, "states": list(states)}
    optimize = {"adamw": {"lr": 1e-2}, **sections.pop("optimize", {})}
    manifest = {
        "partition": {"use": [*([] if layout == "replicated" else [layout]), "nvme_offload"], "nvme_offload": disk},
        "optimize": {"use": ["adamw"] + ["early_update"] * early, **optimize},
        **sections,
    }
    return dsx.prepare(Tangle(width=40), manifest)


def everything(engine: dsx.Engine) -> dict[str, Tensor]:
    """Weights and moments."""
    found = {name: tensor.clone() for name, tensor in engine.weights()}
    for state in ("exp_avg", "exp_avg_sq"):
        found |= {f"{name} {state}": tensor.clone() for name, tensor in engine.program.layout.logical(state)}
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def plain(engine: dsx.Engine, accumulation: int) -> list[Any]:
    """(loss, norm) of each update."""
    found = []
    for step in range(STEPS):
        for micro in range(accumulation):
            engine.backward(engine(*tokens(step, micro, dist.get_rank())))
            engine.program.stepper.drain()  # else what has not begun at the vote is done as usual
            report = engine.step()
        found.append((report.loss, report.norm))
    return found


def compare(layout: str, folder: str, accumulation: int, half: bool, clip: float | None) -> list[str]:
    """What differs from the run without, and what was not done early though it could be, or the other way round."""
    wrong = []
    sections: dict[str, Any] = {"batch": {"accumulation": accumulation}, "precision": {"use": ["bf16"] if half else []}}
    if clip is not None:
        sections["optimize"] = {"clip_norm": clip}
    for states in STATES[layout]:
        found, held = [], []
        for early in (False, True):
            engine = prepare(layout, folder, early, states, **sections)
            found.append(plain(engine, accumulation))
            held.append(everything(engine))
            if early:
                stepper, shards = engine.program.stepper, len(engine.program.layout.shards)
                stood, late = stepper.stood, stepper.late
            engine.close()
        if found[0] != found[1]:
            wrong.append(f"{states}: losses or norms")
        wrong += [f"{states}: {name}" for name in differing(*held)]
        # Parameters that are never used are expected to be in the first update only.
        if clip is None and stood < (STEPS - 1) * shards:
            wrong.append(f"{states}: {stood} updates of {STEPS} times {shards} shards were made early")
        if clip is not None and stood:
            wrong.append(f"{states}: {stood} updates were kept that should have been clipped")
        if stood + late != STEPS * shards:
            wrong.append(f"{states}: {stood} and {late} updates of {STEPS} times {shards} shards")
    return wrong


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("world", "accumulation", "half", "clip"),
    [
        (1, 1, False, None),
        (1, 3, True, None),
        (2, 1, True, None),
        (2, 3, False, None),
        (1, 1, True, 1e-3),
        (2, 1, False, 1e-3),
    ],
)
def test_every_bit_is_that_of_the_run_without(ranks, tmp_path, layout, world, accumulation, half, clip) -> None:
    for wrong in ranks.run(compare, layout, str(tmp_path), accumulation, half, clip, world=world, timeout=300):
        assert wrong == []
    assert list(tmp_path.iterdir()) == []


def unusual(engine: dsx.Engine) -> list[Any]:
    """Windows in which what was expected is not what comes."""
    rank, found = dist.get_rank(), []

    def note() -> None:
        report = engine.step()
        found.append((report.loss, report.norm, report.stepped, report.skipped))

    def batch(step: int) -> Any:
        return tokens(step, 0, rank)

    for step in range(2):  # a branch that is not always taken
        engine.backward(engine(*batch(step), side=step % 2 == 1))
        note()
    engine.backward(engine(*batch(2)) * (float("nan") if rank == 0 else 1))  # skipped
    note()
    engine.backward(engine(*batch(3)))
    note()
    for step in (4, 5):  # two backwards of one micro-batch
        engine.backward(engine(*batch(step)))
    note()
    engine.backward(engine(*batch(6)), weight=3.0 + rank)  # weights that differ
    note()
    with engine.accumulate():  # reduced by the step
        engine.backward(engine(*batch(7)))
    note()
    engine.backward(engine(*batch(8)))  # the weights are looked at before the step
    found.append([tensor.sum().item() for _, tensor in engine.weights()])
    note()
    with torch.no_grad(), engine.gathered(["embedding.weight"], modify=True):
        dict(engine.model.named_parameters())["embedding.weight"].mul_(0.5)
    engine.backward(engine(*batch(9)))
    note()
    with torch.no_grad():  # by weights that are perhaps still on their way
        found.append(engine(*batch(10)).item())
    out = engine(*batch(11))
    with torch.no_grad(), engine.gathered(["embedding.weight"]):  # in the middle of a forward, as it were
        found.append(dict(engine.model.named_parameters())["embedding.weight"].sum().item())
    engine.backward(out)
    note()
    return found


def both_unusual(layout: str, folder: str, half: bool, overlap: bool) -> tuple[bool, list[str]]:
    found, held = [], []
    for early in (False, True):
        precision, run = {"use": ["bf16"] if half else []}, {"overlap_publish": overlap}
        engine = prepare(layout, folder, early, STATES[layout][-1], precision=precision, run=run)
        found.append(unusual(engine))
        held.append(everything(engine))
        engine.close()
    return repr(found[0]) == repr(found[1]), differing(*held)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world", "half", "overlap"), [(1, False, True), (2, True, False), (2, False, True)])
def test_what_was_not_expected_is_done_as_usual(ranks, tmp_path, layout, world, half, overlap) -> None:
    assert (
        ranks.run(both_unusual, layout, str(tmp_path), half, overlap, world=world, timeout=300) == [(True, [])] * world
    )


def test_a_loss_scale_is_expected_to_stay(tmp_path) -> None:
    """The first updates are skipped until the scale fits; then it grows in the middle."""
    found = []
    for early in (False, True):
        precision = {
            "use": ["fp16", "dynamic_loss_scale"],
            "dynamic_loss_scale": {"initial": 2.0**40, "window": 3},
        }
        engine = prepare("zero1", str(tmp_path), early, precision=precision)
        reports = [engine.train_step([tokens(step, 0, 0)]) for step in range(40)]
        if early:
            assert engine.program.stepper.stood > 0
        assert {report.skipped for report in reports} == {True, False}
        found.append((reports[-1].loss, everything(engine)))
        engine.close()
    assert found[0][0] == found[1][0] and differing(found[0][1], found[1][1]) == []


def saved_and_resumed(layout: str, folder: str) -> list[list[float]]:
    """Losses after a checkpoint: of the run that wrote it, of one that resumes it, and of one that does without."""
    first = prepare(layout, folder, True, precision={"use": ["bf16"]})
    for step in range(3):
        first.train_step([tokens(step, 0, dist.get_rank())])
    first.save(Path(folder) / "saved")
    engines = [first]
    for early in (True, False):
        engines.append(prepare(layout, folder, early, precision={"use": ["bf16"]}))
        engines[-1].load(Path(folder) / "saved")
    losses = [[e.train_step([tokens(step, 0, dist.get_rank())]).loss for step in range(3, 6)] for e in engines]
    for engine in engines:
        engine.close()
    return losses


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_checkpoints_do_not_know_of_it(ranks, tmp_path, layout) -> None:
    for first, resumed, without in ranks.run(saved_and_resumed, layout, str(tmp_path), world=2):
        assert first == resumed == without


def test_an_update_that_fails_is_heard_of(tmp_path, monkeypatch) -> None:
    engine = prepare("replicated", str(tmp_path), True)
    engine.train_step([tokens(0, 0, 0)])

    def fail(piece: Piece, states: Any, job: Job, sums: Tensor) -> None:
        raise DsxError("the disk is gone")

    monkeypatch.setattr(engine.program.rule, "update", fail)
    with pytest.raises(DsxError, match="the disk is gone"):
        engine.train_step([tokens(1, 0, 0)])


class Gate:
    """Holds the updates of a rule back until it is opened."""

    def __init__(self, engine: dsx.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.begun = threading.Event(), 0
        update = engine.program.rule.update

        def held(*arguments: Any) -> Any:
            self.begun += 1
            assert self.open.wait(60)
            return update(*arguments)

        monkeypatch.setattr(engine.program.rule, "update", held)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("clip", [None, 1e-3])
def test_what_is_left_is_made_during_the_next_forward(tmp_path, monkeypatch, layout: str, clip: float | None) -> None:
    sections: dict[str, Any] = {"run": {"overlap_publish": True}}
    if clip is not None:
        sections["optimize"] = {"clip_norm": clip}
    found = []
    for early in (False, True):
        engine = prepare(layout, str(tmp_path), early, **sections)
        engine.train_step([tokens(0, 0, 0)])
        engine.quiesce()
        if early:
            gate = Gate(engine, monkeypatch)
            engine.train_step([tokens(1, 0, 0)])  # returns, though nothing is updated
            assert gate.begun <= 1 and not gate.open.is_set()
            threading.Timer(0.2, gate.open.set).start()
            loss = engine(*tokens(2, 0, 0))  # waits for what it uses
            assert gate.open.is_set()
            engine.backward(loss)
            engine.step()
        else:
            for step in (1, 2):
                engine.train_step([tokens(step, 0, 0)])
        found.append(everything(engine))
        engine.close()
    assert differing(*found) == []


def test_a_late_update_that_fails_is_heard_of(tmp_path, monkeypatch) -> None:
    engine = prepare("zero1", str(tmp_path), True, run={"overlap_publish": True})
    engine.train_step([tokens(0, 0, 0)])
    engine.quiesce()
    gate = Gate(engine, monkeypatch)
    held = engine.program.rule.update

    def fail(*arguments: Any) -> None:
        held(*arguments)
        raise DsxError("the disk is gone")

    monkeypatch.setattr(engine.program.rule, "update", fail)
    engine.train_step([tokens(1, 0, 0)])
    gate.open.set()
    with pytest.raises(DsxError, match="the disk is gone"):
        engine(*tokens(2, 0, 0))


def test_reading_ahead_that_fails_is_heard_of(tmp_path, monkeypatch) -> None:
    """It is the thread's last work, when others may have begun already."""
    engine = prepare("zero1", str(tmp_path), True, run={"overlap_publish": True})
    engine.train_step([tokens(0, 0, 0)])
    engine.quiesce()
    prepare_ahead, here = Walk.prepare, threading.get_ident()

    def fail(walk: Walk, shards: Any) -> None:
        if threading.get_ident() != here:
            raise DsxError("the disk is gone")
        prepare_ahead(walk, shards)

    def train() -> None:
        for step in range(1, 4):
            engine.train_step([tokens(step, 0, 0)])
        engine.quiesce()

    monkeypatch.setattr(Walk, "prepare", fail)
    with pytest.raises(DsxError, match="the disk is gone"):
        train()


def cut_finer(layout: str, folder: str) -> list[str]:
    found = []
    for limit in (None, 2000):
        cuts = {} if limit is None else {"limit_bytes": limit}
        disk = {"path": folder, "piece_bytes": 4096}
        manifest = {
            "partition": {"use": [layout, "nvme_offload"], "nvme_offload": disk, layout: cuts},
            "optimize": {"use": ["adamw", "early_update"]},
            "run": {"overlap_publish": True},
        }
        engine = dsx.prepare(Tangle(width=40), manifest)
        flats = [flat for unit in engine.program.layout.units for flat in unit.flats]
        if limit is not None:
            assert all(flat.size * 4 <= limit or len(flat.segments) == 1 for flat in flats)
            assert len(flats) > len(engine.program.layout.units)
        for step in range(STEPS):
            engine.train_step([tokens(step, 0, dist.get_rank())])
        found.append(everything(engine))
        engine.close()
    return differing(*found)


@pytest.mark.parametrize("layout", ["zero1", "zero2", "zero3"])
def test_units_may_be_cut_finer(ranks, tmp_path, layout: str) -> None:
    assert ranks.run(cut_finer, layout, str(tmp_path), world=2) == [[], []]


def test_plans_show_what_it_holds(tmp_path) -> None:
    manifest = {
        "partition": {"use": ["zero1", "nvme_offload"], "nvme_offload": {"path": str(tmp_path)}},
        "optimize": {"use": ["adamw", "early_update"]},
        "precision": {"use": ["bf16"]},
    }
    model = Tangle(width=24)
    found = dsx.forecast(model, manifest, batch=tokens(0, 0, 0)).rehearsal.states
    engine = dsx.prepare(model, manifest)
    engine.train_step([tokens(0, 0, 0)])
    stepper, store = engine.program.stepper.bytes(), engine.program.store.bytes()
    assert found["device", "early param"] == stepper["early param"] > 0
    optimizer = sum(size for name, size in store.items() if name in ("master", "exp_avg", "exp_avg_sq"))
    assert found["disk", "second values"] == store["second values"] == optimizer
    engine.close()


class Summing(Rule):
    """A rule that sums over parameters."""

    sums = 1


class Blocks(Rule):
    """A rule that keeps a number for each block."""

    states = (State("scale", shape="block"),)


@pytest.mark.parametrize("rule", [Summing, Blocks])
def test_rules_that_need_more_than_their_piece_are_refused(tmp_path, rule) -> None:
    class Plugin:
        descriptor = Descriptor(
            name="other",
            section="optimize",
            contract=1,
            fills={"rule": Fill(offers=("rule.silent", "rule.pieces"))},
        )

        @hook
        def dsx_optimize(self) -> list[Part]:
            return [Part("rule", lambda ctx: rule())]

    manifest = {
        "partition": {"use": ["nvme_offload"], "nvme_offload": {"path": str(tmp_path)}},
        "optimize": {"use": ["other", "early_update"]},
    }
    with pytest.raises(DsxError, match="cannot run with this optimizer"):
        dsx.prepare(Tangle(), manifest, plugins={"other": Plugin()})


@pytest.mark.parametrize("tiers", [[], ["cpu_offload"]])
def test_it_is_refused_where_it_has_nothing_to_do(tiers) -> None:
    manifest = {"partition": {"use": ["zero1", *tiers]}, "optimize": {"use": ["adamw", "early_update"]}}
    with pytest.raises(DsxError, match="nothing to do") as caught:
        dsx.prepare(Tangle(), manifest)
    assert "nvme_offload" in str(caught.value)


def test_it_keeps_its_contract(ranks, tmp_path) -> None:
    disk = {"use": ["zero1", "nvme_offload"], "nvme_offload": {"path": str(tmp_path)}}
    check_plugin("early_update", beside={"partition": disk, "optimize": {"use": ["adamw"]}}, ranks=ranks)
