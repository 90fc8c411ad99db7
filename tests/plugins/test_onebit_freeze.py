"""When `onebit_adam` freezes the variance, and what `dsx explain` says of runs where that is too late or too soon."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dsx.cli.explain import command
from dsx_onebit.freeze import Freeze, expected


def frozen_at(beta2: float, norm: Callable[[int], float]) -> int:
    """The update after which only signs travel, if the variance's norm after update t is `norm(t)`."""
    freeze, step = Freeze(None, beta2), 1
    while not freeze.compresses(step):
        freeze.decided(norm(step - 1))
        step += 1
    return step - 1


@pytest.mark.parametrize(("beta2", "settles"), [(0.9, 37), (0.99, 378), (0.999, 3783)])
def test_the_raw_variance_settles_when_it_has_seen_enough(beta2: float, settles: int) -> None:
    """The vote of an update hears of the one before."""
    assert expected(beta2) == settles
    assert frozen_at(beta2, lambda step: 1 - beta2**step) == settles + 1


def test_a_large_first_gradient_does_not_freeze_the_variance_early() -> None:
    """While it is forgotten the variance falls, so that the older norm is the larger from the start."""
    norms = [0.0]
    for step in range(1, 200):
        norms.append(0.9 * norms[-1] + 0.1 * (1000.0 if step == 1 else 1.0))
    assert norms[1] > norms[11]
    assert frozen_at(0.9, norms.__getitem__) == expected(0.9) + 1


def test_a_variance_that_grows_is_not_settled() -> None:
    assert frozen_at(0.9, lambda step: 1.1 ** min(step, 60)) == 60 + 10 + 1


@pytest.mark.parametrize(
    ("options", "steps", "words"),
    [
        ({}, 300, "no update is compressed: the freeze is at about 3783, and run.steps is 300"),
        ({"betas": [0.9, 0.99]}, 1000, "1000 updates are few for a freeze"),
        ({"betas": [0.9, 0.99]}, 2000, "378 of 2000 updates come before the freeze"),
        (
            {"betas": [0.9, 0.99], "freeze": 100},
            3000,
            "the variance is frozen after update 100, but with betas[1] = 0.99 it settles at about 378",
        ),
    ],
)
def test_explain_warns_when_a_run_is_too_short_for_the_freeze(
    tmp_path: Path, options: dict[str, Any], steps: int, words: str
) -> None:
    lines = [f"{key} = {value}" for key, value in options.items()]
    text = f'[run]\nsteps = {steps}\n[optimize]\nuse = ["onebit_adam"]\n[optimize.onebit_adam]\n' + "\n".join(lines)
    (tmp_path / "run.toml").write_text(text)
    shown = CliRunner().invoke(command, [str(tmp_path / "run.toml")])
    assert shown.exit_code == 0, shown.output
    assert f"note: onebit_adam: {words}" in shown.output


def test_explain_says_nothing_of_a_run_that_is_long_enough(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[run]\nsteps = 3000\n[optimize]\nuse = ["onebit_adam"]\n[optimize.onebit_adam]\nbetas = [0.9, 0.99]\n'
    )
    assert "note:" not in CliRunner().invoke(command, [str(tmp_path / "run.toml")]).output
