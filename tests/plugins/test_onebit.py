"""`onebit_adam` against the algorithm of its paper, in float64; bytes, resume, layouts, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.testing import check_plugin, largest, refuses
from dsx.testing.models import Tangle
from plugins import onebit_runs as runs
from plugins.onebit_plain import Numbers
from plugins.onebit_plain import train as plain

STEPS = 8


def manifest(n: dict[str, Any], **more: Any) -> dict[str, Any]:
    return runs.manifest("onebit_adam", n, **more)


@pytest.mark.parametrize(
    ("layout", "world", "signs", "accumulation", "clip_norm", "side"),
    [
        ("replicated", 2, "scaled", 1, None, ""),
        ("replicated", 3, "momentum", 1, None, ""),
        ("replicated", 3, "scaled", 2, 0.5, "turns"),
        ("replicated", 4, "momentum", 1, 0.5, "turns"),
        ("replicated", 2, "scaled, followed", 1, None, "turns"),
        ("replicated", 3, "momentum, followed", 2, 0.5, ""),
        ("zero1", 2, "scaled", 2, None, ""),
        ("zero1", 3, "scaled, followed", 1, 0.5, "turns"),
        ("zero1", 4, "scaled", 1, None, "turns"),
    ],
)
def test_the_papers_algorithm_in_float64(ranks, layout, world, signs, accumulation, clip_norm, side) -> None:
    """Tied, frozen, unused and empty parameters, a branch that ranks take in turns; padding has no part in scales.

    `followed` is not the paper's; a window of its variance is two updates.
    """
    signs, _, followed = signs.partition(", ")
    follow, beta2 = bool(followed), 0.5 if followed else 0.95
    n: dict[str, Any] = {"freeze": 3, "signs": signs, "follow": follow, "lr": 3e-3, "betas": [0.9, beta2]}
    more: dict[str, Any] = {"batch": {"accumulation": accumulation}, "layout": layout, "clip_norm": clip_norm}
    found = ranks.run(runs.train, "onebit_adam", n, STEPS, side=side, world=world, **more)
    numbers = Numbers(
        freeze=3,
        signs=signs,
        follow=follow,
        lr=3e-3,
        betas=(0.9, beta2),
        clip_norm=clip_norm or float("inf"),
        owned=layout == "zero1",
    )
    runs.assert_plain(found, plain, numbers, side, world=world, steps=STEPS, accumulation=accumulation)


def test_an_empty_parameter_and_one_that_nobody_uses_stay_as_they_are_case_26(ranks) -> None:
    """No NaN, no decay."""
    start = dict(Tangle().double().named_parameters())
    for _, weights in ranks.run(
        runs.train, "onebit_adam", {"freeze": 2, "lr": 0.1, "weight_decay": 0.5}, STEPS, world=2
    ):
        assert weights["empty"].numel() == 0
        assert torch.equal(weights["never"], start["never"])
        assert all(tensor.isfinite().all() for tensor in weights.values())


LAST = 14


@pytest.mark.parametrize(
    ("layout", "precision", "freeze", "follow"),
    [
        ("replicated", "", 5, True),
        ("replicated", "bf16", None, False),
        ("zero1", "bf16", 5, True),
        ("zero1", "", None, False),
    ],
)
def test_resumed_in_warm_up_at_the_freeze_and_after_it_goes_on_bit_for_bit_case_88(
    ranks, tmp_path: Path, layout: str, precision: str, freeze: int | None, follow: bool
) -> None:
    """With a freeze by the variance, a small beta2 lets it settle at update 12."""
    at = [3, 4, 5, 6, 9] if freeze else [3, 12, 13]
    options = {"lr": 3e-3, "betas": [0.9, 0.7], "follow": follow, **({"freeze": freeze} if freeze else {})}
    more: dict[str, Any] = {"precision": {"use": [precision]}} if precision else {}
    call = (runs.interrupted, "onebit_adam", options, at, LAST, str(tmp_path))
    for different in ranks.run(*call, layout=layout, world=2, **more):
        assert different == []


@pytest.mark.parametrize("world", [1, 2, 4])
def test_on_another_number_of_ranks_the_mean_of_the_error_feedback_goes_on(ranks, tmp_path: Path, world: int) -> None:
    call = (runs.resized, "onebit_adam", {"lr": 3e-3, "betas": [0.9, 0.7], "freeze": 2}, 5)
    before = ranks.run(*call, None, str(tmp_path / "saved"), world=3)
    after = ranks.run(*call, str(tmp_path / "saved"), None, world=world)
    for name, tensor in before[0].items():
        wanted = tensor
        if name.startswith("worker_error/"):
            wanted = torch.stack([found[name] for found in before]).double().mean(0).float()
        for found in after:
            assert torch.allclose(found[name], wanted, rtol=1e-6, atol=1e-7), name


def test_a_compressed_run_moves_to_zero1_and_back(ranks, tmp_path: Path) -> None:
    """The stage exchanges something else, so losses of about 11 are near, not the same; what each side lacks starts at
    zero."""
    move = runs.across, "onebit_adam", {"lr": 3e-3, "betas": [0.9, 0.7], "freeze": 2}
    first = ranks.run(*move, "replicated", None, str(tmp_path / "replicated"))[0]
    there = ranks.run(*move, "zero1", str(tmp_path / "replicated"), str(tmp_path / "zero1"))[0]
    back = ranks.run(*move, "replicated", str(tmp_path / "zero1"), None)[0]
    assert largest(there, first) < 0.2  # type: ignore[arg-type]
    assert largest(back, first) < 0.2  # type: ignore[arg-type]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["replicated", "zero1"])
def test_bytes_sent_are_the_formula_s(ranks, layout: str, world: int) -> None:
    """Two exchanges of one bit an element, and of 32 for each block; a number for each parameter's size. At most 1/30
    of fp32's all-reduce, 1/15 of bf16's."""
    options = {"freeze": 1, "follow": True}
    for sizes, _, found in ranks.run(runs.sent, "onebit_adam", options, 2, layout=layout, world=world):
        each, elements = sizes["padded"] // world, sizes["elements"]
        looks = 2 * (world - 1) / world * 8 * sizes["parameters"]
        assert found["rule"] == 2 * (world - 1) * (each // 8 + each // 1024 * 4) + looks
        assert set(found) <= {"rule", "vote", "admin"}
        assert found["rule"] <= 2 * 4 * elements * (world - 1) / world / 30
        assert found["rule"] <= 2 * 2 * elements * (world - 1) / world / 15


def test_groups_have_their_own_numbers_after_the_freeze(ranks) -> None:
    call = (runs.grouped, "onebit_adam", {"freeze": 2, "lr": 3e-3}, 6)
    one = ranks.run(*call, False)[0]
    first, second = ranks.run(*call, True)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    runs.slower(one, first)


@pytest.mark.parametrize(
    ("layout", "precision"), [("replicated", []), ("zero1", ["bf16"]), ("replicated", ["fp16", "dynamic_loss_scale"])]
)
def test_a_skipped_update_changes_no_error_feedback_cases_59_and_63(ranks, layout, precision) -> None:
    call = (runs.skipping, "onebit_adam", {"freeze": 2, "lr": 1e-3}, 4, precision)
    assert ranks.run(*call, layout=layout) == [[], []]


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
        found = dsx.forecast(runs.Wide(), manifest({"freeze": 1}, layout=layout), batch=torch.ones(2, 512), world=4)
        states = {name: size for (_, name), size in found.rehearsal.states.items() if name not in ("param", "grad")}
        padded = 4 * 5 * (512 * 512 + 1024)
        padded = -(-padded // (4 * 4 * 1024)) * 4 * 4 * 1024
        assert sum(states.values()) == pytest.approx(padded * (whole + part / 4), rel=0.01)
        assert found.rehearsal.work.sent["rule"] < 2 * padded * 3 / 4 / 30


def other(path: str, at: int, options: dict[str, Any] | None) -> str:
    """What loading a run's checkpoint under another optimizer says."""
    engine = dsx.prepare(Tangle(), manifest({"freeze": 2}))
    runs.steps_of(engine, range(at))
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
