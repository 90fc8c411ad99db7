"""`zero_one_adam` against the algorithm of its paper, in float64; bytes, what ranks have in common, resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import dsx
from dsx.cli.explain import command
from dsx.testing import check_plugin, largest, refuses, weights_of
from dsx.testing.models import Tangle
from dsx_onebit.intervals import meets, renews
from plugins import onebit_runs as runs
from plugins.zero_one_plain import Numbers
from plugins.zero_one_plain import train as plain

NAME = "zero_one_adam"
STEPS = 16
EARLY: dict[str, Any] = {"freeze": 8, "variance_scale": 2, "local_scale": 3, "local_limit": 4}
"""Exact up to 3; signs of gradients in 4, 6 and 8, the variance again in 5 and 7; ranks meet in 9 to 12, 14 and 16."""


def test_the_variance_is_looked_at_and_ranks_meet_at_the_papers_updates() -> None:
    numbers = Numbers(freeze=40, variance_scale=3, local_scale=7, local_limit=12)
    assert {step for step in range(1, 41) if renews(step, 3)} == numbers.looks(40)
    assert {step for step in range(41, 200) if meets(step, 40, 7, 12)} == numbers.meetings(199)
    assert sorted(Numbers(40, 2, 7, 1).looks(40)) == [1, 2, 3, 5, 7, 11, 15, 23, 31]
    assert sorted(Numbers(8, 2, 3, 4).meetings(24)) == [9, 10, 11, 12, 14, 16, 20, 24]


@pytest.mark.parametrize(
    ("world", "accumulation", "clip_norm", "side", "changes"),
    [
        (2, 1, None, "", {}),
        (2, 2, 0.5, "turns", {"local_limit": 1}),
        (3, 2, 0.5, "turns", {"variance_scale": 1}),
        (4, 1, None, "turns", {"freeze": 1, "local_scale": 2}),
        (3, 1, 0.5, "", {"freeze": 30}),
    ],
)
def test_the_papers_algorithm_in_float64(ranks, world, accumulation, clip_norm, side, changes) -> None:
    """Tied, frozen, unused and empty parameters, a branch that ranks take in turns; the weights that ranks share."""
    n = {"lr": 3e-3, "betas": [0.9, 0.95], **EARLY, **changes}
    more = {"batch": {"accumulation": accumulation}, "clip_norm": clip_norm}
    found = ranks.run(runs.train, NAME, n, STEPS, side=side, world=world, **more)
    numbers = Numbers(**{**n, "betas": (0.9, 0.95), "clip_norm": clip_norm or float("inf")})
    runs.assert_plain(found, plain, numbers, side, world=world, steps=STEPS, accumulation=accumulation)


def test_an_empty_parameter_and_one_that_nobody_uses_stay_as_they_are_case_26(ranks) -> None:
    start = dict(Tangle().double().named_parameters())
    for _, weights in ranks.run(runs.train, NAME, {**EARLY, "lr": 0.01, "weight_decay": 0.5}, STEPS, world=2):
        assert weights["empty"].numel() == 0
        assert torch.equal(weights["never"], start["never"])
        assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_sent_are_the_formula_s_and_none_where_ranks_move_by_themselves(ranks, world: int) -> None:
    """fp32 where the variance is looked at; else two exchanges of one bit an element and 32 for each block."""
    for sizes, *found in ranks.run(runs.sent, NAME, EARLY, STEPS, world=world):
        each, elements = sizes["padded"] // world, sizes["elements"]
        signs = 2 * (world - 1) * (each // 8 + each // 1024 * 4)
        for step, counted in enumerate(found, 1):
            looks, local = step in (1, 2, 3, 5, 7), step in (13, 15)
            assert counted.get("rule", 0) == (0 if looks or local else signs), step
            assert (counted.get("reduce", 0) >= 2 * 4 * elements * (world - 1) / world) == looks, step
            assert looks or "reduce" not in counted, step
            assert counted["vote"] < 1000, step
        assert signs <= 2 * 2 * elements * (world - 1) / world / 15


def apart(precision: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]]:
    """Weights, live parameters, and those that are shown, after each update."""
    sections: dict[str, Any] = {"precision": {"use": [precision]}} if precision else {}
    engine = dsx.prepare(Tangle(), runs.manifest(NAME, {**EARLY, "lr": 3e-3}, **sections))

    def live() -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}

    found = []
    for step in range(STEPS):
        runs.steps_of(engine, range(step, step + 1))
        before = live()
        with engine.settled():
            found.append((weights_of(engine), before, live()))
    engine.close()
    return found


@pytest.mark.parametrize("precision", ["", "bf16"])
def test_ranks_are_apart_between_meetings_and_their_weights_are_those_of_the_last_one(ranks, precision: str) -> None:
    first, second = ranks.run(apart, precision, world=2)
    for step, ((weights, one, shown), (_, two, others)) in enumerate(zip(first, second, strict=True), 1):
        name = "embedding.weight"
        assert torch.equal(one[name], two[name]) == (step not in (13, 15)), step
        for key, tensor in shown.items():
            assert torch.equal(tensor, others[key])
            assert torch.equal(tensor, weights[key].to(tensor.dtype)), (step, key)


@pytest.mark.parametrize(("precision", "at"), [("", [2, 3, 4, 5, 8, 9, 13, 14]), ("bf16", [6, 8, 15])])
def test_resumed_in_each_phase_and_between_meetings_goes_on_bit_for_bit_case_88(
    ranks, tmp_path: Path, precision: str, at: list[int]
) -> None:
    more: dict[str, Any] = {"precision": {"use": [precision]}} if precision else {}
    call = (runs.interrupted, NAME, {**EARLY, "lr": 3e-3}, at, STEPS, str(tmp_path))
    assert ranks.run(*call, world=2, **more) == [[], []]


@pytest.mark.parametrize(("world", "steps"), [(1, 6), (2, 13), (4, 13)])
def test_on_another_number_of_ranks_the_mean_of_what_ranks_have_of_their_own_goes_on(
    ranks, tmp_path: Path, world: int, steps: int
) -> None:
    call = (runs.resized, NAME, {**EARLY, "lr": 3e-3}, steps)
    before = ranks.run(*call, None, str(tmp_path / "saved"), world=3)
    after = ranks.run(*call, str(tmp_path / "saved"), None, world=world)
    for name, tensor in before[0].items():
        wanted = tensor
        if name.startswith(("worker_error/", "exp_avg/", "moved/", "live/")):
            wanted = torch.stack([found[name] for found in before]).double().mean(0).float()
        for found in after:
            assert torch.allclose(found[name], wanted, rtol=1e-5, atol=1e-6), name


def test_groups_have_their_own_numbers_in_each_phase(ranks) -> None:
    call = (runs.grouped, NAME, {**EARLY, "lr": 3e-3}, STEPS)
    one = ranks.run(*call, False)[0]
    first, second = ranks.run(*call, True)
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    runs.slower(one, first)


@pytest.mark.parametrize(
    ("steps", "precision"), [(5, []), (12, ["bf16"]), (13, []), (13, ["fp16", "dynamic_loss_scale"])]
)
def test_a_skipped_update_changes_no_state_cases_59_and_63(ranks, steps: int, precision: list[str]) -> None:
    assert ranks.run(runs.skipping, NAME, {**EARLY, "lr": 1e-3}, steps, precision) == [[], []]


def test_the_contract(ranks) -> None:
    """While every update looks at the variance it is AdamW, on any number of ranks."""
    check_plugin(NAME, {"lr": 3e-3}, ranks=ranks)


def test_sharded_states_and_gradients_are_refused_with_the_reason() -> None:
    tables = runs.manifest(NAME, {}, layout="zero1")
    refuses(tables, f"'{NAME}' needs 'optimizer.whole'")
    refuses(tables, "every rank makes updates of its own, for which it needs all of the states")
    refuses(runs.manifest(NAME, {}, layout="zero2"), "it compresses each rank's own gradient")
    refuses(runs.manifest(NAME, {}, layout="zero3"), f"'{NAME}' needs 'gradients.local'")
    refuses(runs.manifest(NAME, {"block": 1000}), "block = 1000 is no multiple of 1024: take 1024")
    refuses(runs.manifest(NAME, {"local_limit": 0}), "above 0")


def test_a_plan_has_the_bytes_of_the_weights_apart_and_of_the_error_feedback() -> None:
    """Weights, momentum, variance, how far, the worker's error; the owner's 1/N."""
    for options, whole in (({}, 5), ({"local_limit": 1}, 4)):
        found = dsx.forecast(
            runs.Wide(), runs.manifest(NAME, {"freeze": 1, **options}), batch=torch.ones(2, 512), world=4
        )
        states = {name: size for (_, name), size in found.rehearsal.states.items() if name not in ("param", "grad")}
        padded = 4 * 5 * (512 * 512 + 1024)
        assert sum(states.values()) == pytest.approx(padded * (whole + 1 / 4), rel=0.02)


def elsewhere(path: str, use: str) -> str:
    """What loading its checkpoint under another optimizer says."""
    engine = dsx.prepare(Tangle(), runs.manifest(NAME, {}))
    runs.steps_of(engine, range(1))
    engine.save(path)
    engine.close()
    try:
        dsx.prepare(Tangle(), {"optimize": {"use": [use]}}).load(path)
    except dsx.DsxError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("use", ["adamw", "onebit_adam"])
def test_its_states_are_refused_by_another_optimizer(ranks, tmp_path: Path, use: str) -> None:
    (text,) = ranks.run(elsewhere, str(tmp_path / "saved"), use, world=1)
    assert f"are those of {NAME}, which no other can go on with" in text


def continued(path: str) -> tuple[list[float], list[float]]:
    """An AdamW run of five updates, gone on with, and gone on with in a phase in which signs would travel."""
    engine = dsx.prepare(Tangle(), {"optimize": {"use": ["adamw"]}})
    runs.steps_of(engine, range(5))
    engine.save(path)
    wanted = runs.steps_of(engine, range(5, 9))
    engine.close()
    again = dsx.prepare(Tangle(), runs.manifest(NAME, EARLY))
    again.load(path)
    assert again.program.rule.scope(6) == "mean"
    losses = runs.steps_of(again, range(5, 9))
    assert again.program.rule.scope(10) == "local"
    again.close()
    return losses, wanted  # type: ignore[return-value]


def test_a_run_of_adamw_goes_on_with_a_look_at_the_variance(ranks, tmp_path: Path) -> None:
    """The momentum starts anew, so losses, which are between 10 and 17, are near, not the same."""
    for losses, wanted in ranks.run(continued, str(tmp_path / "saved"), world=2):
        assert losses[0] == wanted[0]
        assert largest(losses, wanted) < 0.6


@pytest.mark.parametrize(
    ("options", "steps", "words"),
    [
        ("", 17, "no update is compressed: the first 17 look at the variance, and run.steps is 17"),
        ("freeze = 500", 500, "no rank makes updates of its own: they follow update 500, and run.steps is 500"),
        ("freeze = 500", 501, ""),
    ],
)
def test_explain_warns_of_a_run_that_is_too_short(tmp_path: Path, options: str, steps: int, words: str) -> None:
    text = f'[run]\nsteps = {steps}\n[optimize]\nuse = ["{NAME}"]\n[optimize.{NAME}]\n{options}\n'
    (tmp_path / "run.toml").write_text(text)
    shown = CliRunner().invoke(command, [str(tmp_path / "run.toml")])
    assert shown.exit_code == 0, shown.output
    assert f"note: {NAME}: {words}" in shown.output if words else "note:" not in shown.output
