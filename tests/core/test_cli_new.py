"""`dsx new`: what it makes works at once, and what cannot work is refused before anything is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsx.cli import call
from unpacked import add_metadata


def test_new_package_passes_its_own_tests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name whose class would be that of a contract: the hardest case for the names in the code."""
    assert call(["new", "schedule", "--in", str(tmp_path / "work")]) == 0
    project = tmp_path / "work" / "dsx-schedule"
    assert f'cd {project} && pip install -e ".[test]" && pytest' in capsys.readouterr().out
    add_metadata(project, tmp_path / "site")
    path = os.pathsep.join([str(project), str(tmp_path / "site"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_every_name_is_replaced(tmp_path: Path) -> None:
    assert call(["new", "step_decay", "--in", str(tmp_path)]) == 0
    project = tmp_path / "dsx-step-decay"
    places = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert places == {
        "README.md",
        "pyproject.toml",
        "dsx_step_decay/__init__.py",
        "dsx_step_decay/step_decay.py",
        "tests/test_step_decay.py",
    }
    text = "".join((project / place).read_text("utf-8") for place in places)
    assert "class StepDecay(Schedule):" in text
    assert 'step_decay = "dsx_step_decay.step_decay"' in text
    for old in ("example", "Halving", "halving ", "`halving`"):
        assert old not in text


@pytest.mark.parametrize(
    ("name", "words", "remedy"),
    [
        ("My-Plugin", "'My-Plugin' is no name for a plugin", "dsx new my_plugin"),
        ("StepDecay", "'StepDecay' is no name for a plugin", "dsx new step_decay"),
        ("a__b", "'a__b' is no name for a plugin", "dsx new a_b"),
        ("2nd", "lower-case letters, digits and single underscores", "starting with a letter"),
        ("lambda", "'lambda' is no name for a plugin", "starting with a letter"),
        ("../up", "'../up' is no name for a plugin", "dsx new up"),
        ("dsx_decay", "'dsx_decay' starts with dsx_", "dsx new decay"),
        ("clip_norm", "'clip_norm' is a key of [optimize]", "another name"),
        ("adamw", "a plugin 'adamw' is installed already", "adamw (dsx_optimizers.adamw, from dsx-engine"),
        ("text", "a package dsx_text can be imported already", "dsx_text/__init__.py"),
    ],
)
def test_names_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str, remedy: str
) -> None:
    assert call(["new", "--in", str(tmp_path), "--", name]) in (1, 2)
    text = capsys.readouterr().err
    assert words in text
    assert remedy in text
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dsx-mine").mkdir()
    assert call(["new", "mine", "--in", str(tmp_path)]) == 1
    assert f"{tmp_path / 'dsx-mine'} exists already" in capsys.readouterr().err
    assert list((tmp_path / "dsx-mine").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert call(["new", "mine", "--in", str(tmp_path / "file" / "below")]) == 1
    assert f"{tmp_path / 'file' / 'below' / 'dsx-mine'} cannot be made: Not a directory" in capsys.readouterr().err
