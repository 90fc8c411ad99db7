"""Runs all parts of the checks on this machine's GPU and sums them up: what check.sh calls."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from device.engine import LAYOUTS
from kernels.cases import TABLE

DTYPES = ("float32", "bfloat16", "float16")
"""That attention is checked in: most of the time goes by while its kernels are compiled."""

STAGES: Sequence[tuple[int, Sequence[tuple[str, ...]]]] = (
    (180, [*(("kernels", operation) for operation in TABLE), *(("attention", dtype) for dtype in DTYPES)]),
    (110, [("engine",), ("offload",), ("streams",), *(("ranks", layout) for layout in LAYOUTS)]),
    (90, [("speed",)]),
    (30, [("streams", "overlap")]),
    (60, [("attention_speed",)]),
)
"""Seconds, and the parts that run at the same time within them. What is timed runs alone."""


@dataclass
class Part:
    """A part under way.

    file  where it writes its results
    log   where it prints
    """

    arguments: tuple[str, ...]
    file: Path
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)

    def start(self, device: str) -> None:
        command = [sys.executable, "-m", "device.part", *self.arguments, "--device", device, "--out", str(self.file)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)

    def results(self, deadline: float) -> list[dict[str, Any]]:
        """Its results when it ends, or when the time is over; a part that ends badly adds a failure."""
        end = self._wait(deadline)
        text = self.file.read_text() if self.file.exists() else ""
        found = [{"part": " ".join(self.arguments), **json.loads(line)} for line in text.splitlines()]
        if end is None and found:
            return found
        words = f"{end or 'it checked nothing'}\n{self.log.read_text()[-3000:]}"
        return [*found, {"part": " ".join(self.arguments), "name": "the part", "figures": {}, "failure": words}]

    def _wait(self, deadline: float) -> str | None:
        try:
            code = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)  # with the ranks that it started
            self.process.wait()
            return "its time was over"
        return f"ended with code {code}" if code else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cpu: to try the script itself")
    parser.add_argument("--out", type=Path, help="folder for results.json")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on the time that parts have")
    choices = parser.parse_args()
    machine = _machine(choices.device)
    print(", ".join(f"{name} {value}" for name, value in machine.items()))
    results = _run(choices.device, choices.patience)
    if choices.out is not None:
        choices.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": machine, "results": results}, indent=1)
        (choices.out / "results.json").write_text(text + "\n")
    failed = [result for result in results if result["failure"]]
    print(f"{len(results) - len(failed)} checks passed, {len(failed)} failed")
    return 1 if failed else 0


def _run(device: str, patience: float) -> list[dict[str, Any]]:
    results = []
    with tempfile.TemporaryDirectory(prefix="dsx_device_") as folder:
        for seconds, parts in STAGES:
            named = [(arguments, Path(folder, "_".join(arguments))) for arguments in parts]
            running = [Part(args, name.with_suffix(".jsonl"), name.with_suffix(".log")) for args, name in named]
            for part in running:
                part.start(device)
            deadline = time.monotonic() + seconds * patience
            for part in running:
                found = part.results(deadline)
                _print(" ".join(part.arguments), found)
                results += found
    return results


def _print(part: str, results: Sequence[dict[str, Any]]) -> None:
    """Failures in full, figures, and one line for the rest."""
    failed = sum(result["failure"] is not None for result in results)
    print(f"{part}: {len(results) - failed} passed, {failed} failed", flush=True)
    for result in results:
        if result["failure"]:
            print(f"  FAILED {result['name']}\n    " + result["failure"].strip().replace("\n", "\n    "))
        elif result["figures"]:
            print(f"  {result['name']}: " + ", ".join(f"{key} {value}" for key, value in result["figures"].items()))


def _machine(device: str) -> dict[str, str]:
    import torch

    found = {"device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or device}
    found["python"] = platform.python_version()
    for name in ("torch", "triton", "cupy-cuda13x"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


if __name__ == "__main__":
    sys.exit(main())
