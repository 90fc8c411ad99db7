"""Saving, loading and exporting need pieces of memory, not a second copy: measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

MIB = 1 << 20
WIDTH = 2600
"""A weight of 26 MiB, larger than what is read at once; there are three, with two states each."""


def measure(folder: Path) -> dict[str, float]:
    """By how many MiB each call raised this process's resident memory at most; the second time, all being imported."""
    import torch
    from torch import nn

    import dsx

    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
    engine = dsx.prepare(model)
    engine.backward(engine(torch.randn(2, WIDTH)).square().mean())
    engine.step()
    calls = {
        "save": lambda: engine.save(folder / "checkpoint"),
        "load": lambda: engine.load(folder / "checkpoint"),
        "live": lambda: engine.export(folder / "live"),
        "export": lambda: dsx.export(folder / "checkpoint", folder / "out", overwrite=True),
        "bf16": lambda: dsx.export(folder / "checkpoint", folder / "bf16", "bfloat16", overwrite=True),
    }
    found = {}
    for name, call in calls.items():
        if name != "live":
            call()
        found[name] = peak(call) / MIB
    return found


def peak(call: object) -> int:
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = resident("VmRSS")
    call()  # type: ignore[operator]
    return resident("VmHWM") - before


def resident(key: str) -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[key].split()[0]) << 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_second_copy_is_made(tmp_path: Path) -> None:
    out = subprocess.run([sys.executable, __file__, str(tmp_path)], check=True, capture_output=True, text=True).stdout
    found = json.loads(out.splitlines()[-1])
    assert found["save"] < 8, found
    assert found["load"] < 20, found  # one piece
    assert found["live"] < 8, found
    assert found["export"] < 20, found
    assert found["bf16"] < 44, found  # and it is cast


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
