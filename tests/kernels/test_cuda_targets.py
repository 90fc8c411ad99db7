"""CUDA kernels compiled by nvcc for GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kernels import cuda_targets

if reason := cuda_targets.missing():
    pytest.skip(reason, allow_module_level=True)


@pytest.mark.slow
def test_compiled_for_other_gpus_nothing_spills() -> None:
    """sm_80, sm_90 and sm_100: spills, widths of accesses, rounding; registers as committed."""
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "kernels.cuda_targets"], capture_output=True, text=True, check=False, env=settings
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "no kernel spills" in done.stdout


@pytest.mark.parametrize(
    ("ptx", "found"),
    [
        ("fma.rn.f32 %f1, %f2, %f3, %f4;", ["fma.rn.f32"]),
        ("mul.rn.ftz.f32 %f1, %f2, %f3;", ["mul.rn.ftz.f32"]),
        ("div.full.f32 %f1, %f2, %f3; sqrt.approx.f32 %f1, %f2;", ["div.full.f32", "sqrt.approx.f32"]),
        ("div.rn.f32 %f1, %f2, %f3; sqrt.rn.f64 %fd1, %fd2; mad.lo.s32 %r1, %r2, %r3, %r4;", []),
    ],
)
def test_instructions_that_do_not_round_to_nearest_are_found(ptx: str, found: list[str]) -> None:
    assert cuda_targets.INEXACT.findall(ptx) == found
