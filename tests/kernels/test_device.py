"""The script that checks a GPU: what it says where there is none, and its parts on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsx_kernels import library

DEVICE = Path(__file__).parents[1] / "device"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    """A command with this interpreter and its import path."""
    settings = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_script_says_so() -> None:
    done = run("bash", DEVICE / "check.sh")
    assert done.returncode == 77
    assert "no GPU here: torch" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("part", ["kernels cast", "ranks zero3", "attention bfloat16", "attention_speed"])
def test_parts_run_on_the_cpu_too(part: str, tmp_path: Path) -> None:
    if part.split()[0] in ("kernels", "attention") and (reason := library.missing()):
        pytest.skip(f"the CPU has no kernel: {reason}")
    done = run(sys.executable, "-m", "device.part", *part.split(), "--device", "cpu", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    assert results
    assert [result["failure"] for result in results if result["failure"]] == []


def test_a_check_that_fails_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(
        "def checks(device, argument):\n    yield 'one', lambda: 1 / 0\n    yield 'two', lambda: {'speed': argument}\n"
    )
    code = f"import device, sys; device.__path__.append({str(tmp_path)!r}); from device import part; part.main()"
    done = run(sys.executable, "-c", code, "broken", "7", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    one, two = (json.loads(line) for line in (tmp_path / "out").read_text().splitlines())
    assert "ZeroDivisionError" in one["failure"]
    assert two["failure"] is None and two["figures"] == {"speed": "7"}


def test_only_wheels_that_are_missing_are_installed(tmp_path: Path) -> None:
    for name in ("pytest-99-py3-none-any.whl", "no_such_thing-1-py3-none-any.whl"):
        (tmp_path / name).touch()
    done = run(sys.executable, DEVICE / "lacking.py", tmp_path)
    assert done.stdout.split() == [str(tmp_path / "no_such_thing-1-py3-none-any.whl")]


def test_an_empty_folder_of_wheels_is_refused(tmp_path: Path) -> None:
    done = run(sys.executable, DEVICE / "lacking.py", tmp_path)
    assert done.returncode == 1
    assert f"there are no wheels in {tmp_path}: bash tests/device/wheels.sh" in done.stderr
