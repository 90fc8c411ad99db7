"""The largest GPT that trains within a cap on memory: plain PyTorch, and dsx with everything in files.

    python tests/bench/memory_cap.py [--gib 2] [--ways torch,files,files-bf16] [--layers 2] [--path FOLDER]

Each training is a process of its own in a control group of its own (version 1 or 2), whose limit counts resident memory
and pages of files alike; who exceeds it is killed by the kernel. Layers are added until one is, to a tenth of them. One
thread, 2 x 64 tokens a step, AdamW.

torch        fp32, fused AdamW, a loop by hand
files        dsx, fp32, `zero3`, `nvme_offload` of optimizer, grad and param, units cut at 16 MB
files-bf16   the same with `bf16`: 16-bit parameters and gradients, fp32 masters

The limit is one of memory alone: what the files take is printed, and must be there on the disk. Needs root.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

GIB = 1 << 30
SAMPLES, TOKENS = 2, 64
WAYS = ("torch", "files", "files-bf16")


def main() -> int:
    choices = _parser().parse_args()
    if choices.inside:
        return _train(*choices.inside.split(","), choices.width, choices.steps, choices.path)
    print("| trained by | parameters | peak MiB | s a step | GB in files |", flush=True)
    print("| --- | --- | --- | --- | --- |", flush=True)
    for way in choices.ways:
        best = _largest(way, choices)
        print(_row(way, best) if best else f"| {way} | killed with {choices.layers} layers | | |", flush=True)
    return 0


def _largest(way: str, choices: argparse.Namespace) -> dict[str, Any] | None:
    """What the largest said, to a tenth of its layers."""
    best, lives, killed = None, 0, None
    layers = choices.layers
    while killed is None or killed - lives > max(1, lives // 10):
        found = _attempt(way, layers, choices)
        if found is None:
            killed = layers
            if best is None:
                return None
        else:
            best, lives = found, layers
        layers = (lives + killed) // 2 if killed else lives + max(1, lives // 2)
    return best


def _row(way: str, found: dict[str, Any]) -> str:
    cells = [way, f"{found['parameters'] / 1e6:,.0f} M", f"{found['peak'] / 2**20:,.0f}", f"{found['seconds']:.1f}"]
    cells.append(f"{found['files'] / 1e9:.1f}")
    return f"| {' | '.join(cells)} |"


def _attempt(way: str, layers: int, choices: argparse.Namespace) -> dict[str, Any] | None:
    """What one training said, and its peak; None if it was killed."""
    command = [sys.executable, __file__, "--inside", f"{way},{layers}", "--width", str(choices.width)]
    with (
        _capped(int(choices.gib * GIB)) as (enter, peak),
        tempfile.TemporaryDirectory(dir=choices.path, prefix="dsx_cap_") as folder,  # who is killed removes nothing
    ):
        command += ["--steps", str(choices.steps), "--path", folder]
        done = subprocess.run(command, preexec_fn=enter, stdout=subprocess.PIPE, text=True, check=False)
        most = peak()
    if done.returncode == -9:
        return None
    if done.returncode:
        raise SystemExit(f"{way} with {layers} layers failed: exit code {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"peak": most}


@contextmanager
def _capped(limit: int) -> Iterator[tuple[Callable[[], None], Callable[[], int]]]:
    """A control group within this process's own: how to enter it, and what it had at most."""
    folder, limit_file, peak_file = _group()
    folder.mkdir()
    try:
        (folder / limit_file).write_text(str(limit))
        if limit_file == "memory.max":
            (folder / "memory.swap.max").write_text("0")

        def enter() -> None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

        yield enter, lambda: int((folder / peak_file).read_text())
    finally:
        for _ in range(50):
            try:
                folder.rmdir()
                break
            except OSError:  # the kernel is not done with who was killed
                time.sleep(0.1)


def _group() -> tuple[Path, str, str]:
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    name = f"dsx_cap_{os.getpid()}"
    if "memory" in own:
        folder = Path("/sys/fs/cgroup/memory") / own["memory"].lstrip("/")
        return folder / name, "memory.limit_in_bytes", "memory.max_usage_in_bytes"
    return Path("/sys/fs/cgroup") / name, "memory.max", "memory.peak"


def _train(way: str, layers: str, width: int, steps: int, path: Path) -> int:
    """One training, within the cap."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.randint(0, 256, (steps, SAMPLES, TOKENS + 1))
    shape = {"layers": int(layers), "width": width, "heads": width // 64, "context": TOKENS}
    run = _by_hand if way == "torch" else partial(_in_files, half=way == "files-bf16")
    print(json.dumps(run(shape, data, str(path))))
    return 0


def _by_hand(shape: dict[str, Any], data: Any, folder: str) -> dict[str, Any]:
    import torch

    from dsx_text import gpt

    model = gpt(**shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    losses, started = [], time.perf_counter()
    for rows in data:
        loss = model(**_batch(rows))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _said(model, losses, time.perf_counter() - started, 0)


def _in_files(shape: dict[str, Any], data: Any, folder: str, half: bool) -> dict[str, Any]:
    import dsx
    from dsx_text import gpt

    with dsx.empty_init():
        model = gpt(**shape)
    manifest = {
        "partition": {
            "use": ["zero3", "nvme_offload"],
            "zero3": {"limit_bytes": 16_000_000},
            "nvme_offload": {"path": folder, "states": ["optimizer", "grad", "param"]},
        },
        "precision": {"use": ["bf16"] if half else []},
        "optimize": {"use": ["adamw"], "adamw": {"lr": 1e-4}},
        "run": {"overlap_publish": True},
    }
    engine = dsx.prepare(model, manifest)
    losses, started = [], time.perf_counter()
    for rows in data:
        losses.append(engine.train_step([_batch(rows)]).loss)
    engine.quiesce()
    seconds = time.perf_counter() - started
    found = _said(model, losses, seconds, sum(engine.program.store.bytes().values()))
    engine.close()
    return found


def _batch(rows: Any) -> dict[str, Any]:
    return {"input_ids": rows[:, :-1], "labels": rows[:, 1:]}


def _said(model: Any, losses: list[float], seconds: float, files: int) -> dict[str, Any]:
    if not all(map(math.isfinite, losses)):
        raise SystemExit(f"losses {losses}")
    count = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": count, "seconds": seconds / len(losses), "files": files}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2, help="the cap")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS))
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=2, help="to begin with; the more, the sooner it is done")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--path", type=Path, help="a folder on the disk; default: that of temporary files")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
