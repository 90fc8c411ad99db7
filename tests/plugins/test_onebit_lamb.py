"""`onebit_lamb` against the algorithm of its paper, in float64; bytes, resume, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor

import dsx
from dsx.cli.explain import command
from dsx.testing import check_plugin, largest, refuses
from dsx.testing.models import Tangle
from plugins import onebit_runs as runs
from plugins.onebit_lamb_plain import Numbers
from plugins.onebit_lamb_plain import train as plain

NAME = "onebit_lamb"
STEPS = 9
EARLY: dict[str, Any] = {"freeze": 4, "lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.05, "coeff_beta": 0.7}


@pytest.mark.parametrize(
    ("layout", "world", "accumulation", "clip_norm", "side", "changes"),
    [
        ("replicated", 2, 1, None, "", {}),
        ("zero1", 2, 2, None, "", {}),
        ("zero1", 3, 1, 0.5, "turns", {"max_coeff": 0.3, "min_coeff": 0.1, "factor_max": 1.2}),
        ("zero1", 4, 1, None, "turns", {"freeze": 2, "weight_decay": 0.0}),
        (
            "replicated",
            3,
            2,
            0.5,
            "turns",
            {"weight_decay": 0.0, "factor_threshold": 0.5, "factor_max": 1.2, "factor_min": 0.9},
        ),
        ("replicated", 4, 1, 0.5, "turns", {"max_coeff": 0.3, "min_coeff": 0.1}),
        ("replicated", 3, 1, None, "turns", {"freeze": 1, "factor_threshold": 0.01}),
    ],
)
def test_the_papers_algorithm_in_float64(ranks, layout, world, accumulation, clip_norm, side, changes) -> None:
    """Tied, frozen, unused and empty parameters, weights of zero, a branch that ranks take in turns; each bound."""
    n = {**EARLY, **changes}
    more = {"batch": {"accumulation": accumulation}, "clip_norm": clip_norm, "layout": layout}
    found = ranks.run(runs.train, NAME, n, STEPS, side=side, world=world, **more)
    n = {**n, "betas": (0.9, 0.95), "clip_norm": clip_norm or float("inf"), "owned": layout == "zero1"}
    numbers = Numbers(**n)
    runs.assert_plain(found, plain, numbers, side, world=world, steps=STEPS, accumulation=accumulation)


def sizes(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Coefficients and the factors on them, by parameter."""
    engine = dsx.prepare(Tangle(), runs.manifest(NAME, {**EARLY, "factor_threshold": 0.05}))
    runs.steps_of(engine, range(steps))
    found = [dict(engine.program.layout.logical(state)) for state in ("coefficient", "ratio")]
    result = tuple({name: tensor.clone() for name, tensor in one.items()} for one in found)
    engine.close()
    return result  # type: ignore[return-value]


def test_after_the_freeze_a_factor_changes_by_no_more_than_its_threshold(ranks) -> None:
    """The coefficient stays as it was at the freeze, and differs between parameters."""
    after = [ranks.run(sizes, steps, world=2)[0] for steps in (4, 5, 6)]
    coefficients = {float(tensor) for tensor in after[0][0].values()}
    assert len(coefficients) > 10 and max(coefficients) > 2 * min(coefficients)
    for name, coefficient in after[0][0].items():
        first, second, third = (float(one[1][name]) for one in after)
        assert first == 1 and torch.equal(after[2][0][name], coefficient)
        assert 0.95 * 0.999 < second < 1.05 * 1.001
        assert 0.95 * 0.999 < third / second < 1.05 * 1.001
    assert any(float(tensor) != 1 for tensor in after[2][1].values())


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("layout", ["replicated", "zero1"])
def test_bytes_sent_are_the_formula_s(ranks, layout: str, world: int) -> None:
    """Under zero1, for each parameter two norms are summed and a ratio gathered."""
    for found_sizes, _, found in ranks.run(runs.sent, NAME, {"freeze": 1}, 2, layout=layout, world=world):
        each, elements = found_sizes["padded"] // world, found_sizes["elements"]
        signs = 2 * (world - 1) * (each // 8 + each // 1024 * 4)
        assert signs <= found["rule"] <= signs + (0 if layout == "replicated" else 1000)
        assert set(found) <= {"rule", "vote", "admin"}
        assert found["rule"] <= 2 * 4 * elements * (world - 1) / world / 30
        assert found["rule"] <= 2 * 2 * elements * (world - 1) / world / 15


@pytest.mark.parametrize(
    ("layout", "precision", "freeze"), [("replicated", "", 5), ("replicated", "bf16", None), ("zero1", "bf16", 5)]
)
def test_resumed_in_warm_up_at_the_freeze_and_after_it_goes_on_bit_for_bit_case_88(
    ranks, tmp_path: Path, layout: str, precision: str, freeze: int | None
) -> None:
    """Without a freeze, the variance settles at update 12 with this beta2."""
    options = {**EARLY, "betas": [0.9, 0.7], "freeze": 5}
    if freeze is None:
        del options["freeze"]
    more: dict[str, Any] = {"precision": {"use": [precision]}} if precision else {}
    at = [3, 4, 5, 6, 9] if freeze else [3, 12, 13]
    call = (runs.interrupted, NAME, options, at, 14, str(tmp_path))
    assert ranks.run(*call, world=2, layout=layout, **more) == [[], []]


@pytest.mark.parametrize("world", [1, 4])
def test_on_another_number_of_ranks_the_mean_of_the_error_feedback_goes_on(ranks, tmp_path: Path, world: int) -> None:
    call = (runs.resized, NAME, EARLY, 6)
    before = ranks.run(*call, None, str(tmp_path / "saved"), world=3)
    after = ranks.run(*call, str(tmp_path / "saved"), None, world=world)
    for name, tensor in before[0].items():
        wanted = tensor
        if name.startswith("worker_error/"):
            wanted = torch.stack([found[name] for found in before]).double().mean(0).float()
        for found in after:
            assert torch.allclose(found[name], wanted, rtol=1e-6, atol=1e-7), name


def test_groups_have_their_own_numbers_in_each_phase(ranks) -> None:
    call = (runs.grouped, NAME, {**EARLY, "freeze": 2}, 6)
    one = ranks.run(*call, False)[0]
    first, second = ranks.run(*call, True)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    runs.slower(one, first)


@pytest.mark.parametrize(
    ("layout", "precision"), [("replicated", []), ("zero1", ["bf16"]), ("replicated", ["fp16", "dynamic_loss_scale"])]
)
def test_a_skipped_update_changes_no_state_cases_59_and_63(ranks, layout: str, precision: list[str]) -> None:
    assert ranks.run(runs.skipping, NAME, {**EARLY, "freeze": 2}, 4, precision, layout=layout) == [[], []]


def test_a_compressed_run_moves_to_zero1_and_back(ranks, tmp_path: Path) -> None:
    """The stage exchanges something else, so losses are near, not the same; what each side lacks starts at zero."""
    move = runs.across, NAME, {**EARLY, "freeze": 2}
    first = ranks.run(*move, "replicated", None, str(tmp_path / "replicated"))[0]
    there = ranks.run(*move, "zero1", str(tmp_path / "replicated"), str(tmp_path / "zero1"))[0]
    back = ranks.run(*move, "replicated", str(tmp_path / "zero1"), None)[0]
    assert 0 < largest(there, first) < 0.3
    assert 0 < largest(back, first) < 0.3


def test_an_empty_parameter_and_one_that_nobody_uses_stay_as_they_are_case_26(ranks) -> None:
    start = dict(Tangle().double().named_parameters())
    for _, weights in ranks.run(runs.train, NAME, {**EARLY, "weight_decay": 0.5}, STEPS, world=2):
        assert weights["empty"].numel() == 0
        assert torch.equal(weights["never"], start["never"])
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_the_contract(ranks) -> None:
    """Before the freeze it is LAMB, on any number of ranks."""
    check_plugin(NAME, {"lr": 3e-3}, ranks=ranks)


def test_what_it_cannot_do_is_refused_with_the_reason() -> None:
    refuses(runs.manifest(NAME, {}, layout="zero2"), "it compresses each rank's own gradient")
    refuses(runs.manifest(NAME, {}, layout="zero3"), f"'{NAME}' needs 'gradients.local'")
    refuses(runs.manifest(NAME, {"block": 1000}), "block = 1000 is no multiple of 1024: take 1024")
    refuses(runs.manifest(NAME, {"min_coeff": 3.0, "max_coeff": 2.0}), "min_coeff = 3 is above max_coeff = 2")
    refuses(runs.manifest(NAME, {"factor_min": 5.0}), "factor_min = 5 is above factor_max = 4")


def test_a_plan_has_the_bytes_of_its_states() -> None:
    """Momentum, variance, the fresh one, the worker's error; the owner's 1/N. zero1: what each rank must have whole."""
    for layout, whole, part in (("replicated", 4, 1), ("zero1", 3, 4)):
        tables = runs.manifest(NAME, {"freeze": 1}, layout=layout)
        found = dsx.forecast(runs.Wide(), tables, batch=torch.ones(2, 512), world=4)
        states = {name: size for (_, name), size in found.rehearsal.states.items() if name not in ("param", "grad")}
        padded = 4 * 5 * (512 * 512 + 1024)
        assert sum(states.values()) == pytest.approx(padded * (whole + part / 4), rel=0.02)


def moved(path: str, at: int, use: str) -> str:
    """What loading its checkpoint under another optimizer says."""
    engine = dsx.prepare(Tangle(), runs.manifest(NAME, {**EARLY, "freeze": 2}))
    runs.steps_of(engine, range(at))
    engine.save(path)
    engine.close()
    again = dsx.prepare(Tangle(), {"optimize": {"use": [use]}})
    try:
        again.load(path)
    except dsx.DsxError as error:
        return str(error)
    runs.steps_of(again, range(at, at + 2))
    assert dist.get_world_size() == 1
    return ""


@pytest.mark.parametrize("use", ["adamw", "onebit_adam", "zero_one_adam"])
def test_its_states_are_moments_before_the_freeze_and_private_after_it(ranks, tmp_path: Path, use: str) -> None:
    assert ranks.run(moved, str(tmp_path / "1"), 1, use, world=1) == [""]
    (text,) = ranks.run(moved, str(tmp_path / "2"), 3, use, world=1)
    assert f"are those of {NAME}, which no other can go on with" in text


def test_explain_warns_of_a_run_that_is_too_short(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[run]\nsteps = 300\n[optimize]\nuse = ["{NAME}"]\n')
    shown = CliRunner().invoke(command, [str(tmp_path / "run.toml")])
    assert f"note: {NAME}: no update is compressed: the freeze is at about 3783" in shown.output, shown.output
