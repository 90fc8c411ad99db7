"""What `import dsx; dsx.prepare` costs on top of `import torch`: medians of a few fresh interpreters.

    python tests/bench/import_time.py [RUNS]

torch's objects are frozen after its import: the collector looks at all of them now and then, some 80 ms, in whatever
import it happens to start. The package is copied and compiled first, as an installed one is: an editable one compiles
its sources at every import where PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import compileall
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CORE = Path(__file__).parents[2] / "core"

LIMIT_MS = 50.0

_PROGRAM = """
import gc, time
times = [time.perf_counter()]
import torch
gc.freeze()
times.append(time.perf_counter())
import dsx
times.append(time.perf_counter())
dsx.prepare
times.append(time.perf_counter())
print(*(later - earlier for earlier, later in zip(times, times[1:])))
"""


def measure(runs: int = 5) -> list[tuple[float, float, float]]:
    """Seconds for `import torch`, `import dsx` and `dsx.prepare` in each of `runs` interpreters after a first."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(CORE / "dsx", Path(folder, "dsx"), ignore=shutil.ignore_patterns("__pycache__", "_template"))
        compileall.compile_dir(folder, quiet=1)
        environment = os.environ | {"PYTHONPATH": folder, "OMP_NUM_THREADS": "1"}
        return [_one(environment) for _ in range(runs + 1)][1:]


def _one(environment: dict[str, str]) -> tuple[float, float, float]:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    torch_s, dsx_s, prepare_s = map(float, done.stdout.split())
    return torch_s, dsx_s, prepare_s


def main(runs: int) -> None:
    """Print the medians, and how long all takes as a multiple of torch alone."""
    torch_s, dsx_s, prepare_s = (statistics.median(times) for times in zip(*measure(runs), strict=True))
    ratio = (torch_s + dsx_s + prepare_s) / torch_s
    print(f"import torch    {torch_s * 1e3:8.1f} ms")
    print(f"import dsx      {dsx_s * 1e3:8.1f} ms more")
    print(f"dsx.prepare     {prepare_s * 1e3:8.1f} ms more, {LIMIT_MS:.0f} wanted at most")
    print(f"all together    {ratio:8.2f} times torch alone")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
