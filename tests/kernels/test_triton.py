"""Triton kernels without a GPU: every case in Triton's interpreter, and compiled for GPUs that are not here.

Each in a process of its own: Triton decides at its import whether it interprets, and plain tests need not load it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kernels.cases import TABLE
from kernels.proof import implementations

if find_spec("triton") is None:
    pytest.skip("triton is not installed: pip install '.[gpu]'", allow_module_level=True)


def run(module: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A module of the tests in a new interpreter, with this one's import path."""
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=settings)


@pytest.mark.parametrize("operation", [name for name in TABLE if "triton" in implementations(name)])
def test_the_interpreter_finds_what_the_reference_does(operation: str) -> None:
    done = run("kernels.triton_cases", operation, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert f"{len(TABLE[operation])} of {len(TABLE[operation])} cases of {operation} passed" in done.stdout


@pytest.mark.slow
def test_compiled_for_other_gpus_nothing_spills(tmp_path: Path) -> None:
    """sm_80, sm_90, sm_100 and gfx942: spills, shared memory, width of accesses; registers as committed."""
    done = run("kernels.triton_targets", TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "no kernel spills" in done.stdout


def test_the_interpreter_finds_dense_attention() -> None:
    done = run("kernels.triton_attention", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    passed, _, count = done.stdout.split()[:3]
    assert passed == count and int(count) > 10


def test_the_interpreter_is_corrected_for_bfloat16() -> None:
    """Rounded to nearest even as torch does, over every border of two numbers; and arithmetic in it is refused."""
    done = run("kernels.triton_bfloat16", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
