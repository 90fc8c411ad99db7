"""What states in files, and an update beside the next step, cost: phases of a step against the bound of each.

    python tests/bench/offload.py [--size 25M] [--rounds 12] [--path FOLDER] [--threads 1] [--layout zero1]

One process trains the same GPT in bf16 with AdamW in several engines, in turns of some steps: with states in memory, in
files, in files with `early_update`, and in both with `delayed_update`. In each turn the same bytes go through the file
engine alone, both ways at once.

forward, backward   until the gradients are there
update              from there until `step` returns; without a stepper that goes on beside the next step, until every
                    state is back in its file
step                both; one step after another, with as much under way at the end as there was at the beginning
bound               the larger of the update in memory and of the files: of the walk through them in an update, or of
                    the file engine alone, whichever is shorter
step / larger phase   of forward and backward, and the bound of an update: what a machine could do that updates and
                      reads and writes for nothing while it computes
step / larger         of a step with states in memory, and the bound: the arithmetic of an update takes its time too
hidden              how much shorter a step is with `delayed_update` or `early_update`, of the update without
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from partition_systems.case import SIZES, Case, batches, model

import dsx
from dsx_kernels.aio import Files, aligned

PIECE, DEEP = 4 << 20, 8
"""Bytes of a transfer, and how many are under way each way."""

TURN = 4
"""Steps that are timed one after another."""

KINDS = ("memory", "files", "files, early", "memory, delayed", "files, delayed")


class Training:
    """One engine and its times, a mean of each turn."""

    def __init__(self, kind: str, case: Case, layout: str, folder: Path, limit: int | None = None) -> None:
        files, delayed, early = kind.startswith("files"), kind.endswith("delayed"), kind.endswith("early")
        manifest: dict[str, Any] = {
            "partition": {"use": [layout] + ["nvme_offload"] * files, layout: {"limit_bytes": limit} if limit else {}},
            "precision": {"use": ["bf16"]},
            "optimize": {"use": ["adamw"] + ["delayed_update"] * delayed + ["early_update"] * early},
            "run": {"overlap_publish": True},  # as `dsx run` does
        }
        if files:
            manifest["partition"]["nvme_offload"] = {"path": str(folder)}
        if delayed:
            manifest["optimize"]["delayed_update"] = {"after": 0}
        self.engine, self.case, self.steps = dsx.prepare(model(case), manifest), case, 0
        self.beside = delayed or early
        self.forward: list[float] = []
        self.update: list[float] = []

    def step(self) -> tuple[float, float]:
        """One step, its two phases apart."""
        (words,) = batches(self.case, self.steps, 0)
        start = time.perf_counter()
        self.engine.backward(self.engine(**words)["loss"])
        between = time.perf_counter()
        self.engine.step()
        if not self.beside:
            self.engine.program.store.drain()
        self.steps += 1
        return between - start, time.perf_counter() - between

    def turn(self) -> None:
        """Some steps, of which the first does not count."""
        self.step()
        times = [self.step() for _ in range(TURN)]
        self.forward.append(sum(forward for forward, _ in times) / TURN)
        self.update.append(sum(update for _, update in times) / TURN)
        self.engine.quiesce()
        self.engine.program.store.drain()

    def bytes(self) -> int:
        """Of the optimizer's states, which an update reads and writes once."""
        held = self.engine.program.store.bytes()
        return sum(count for name, count in held.items() if name not in ("param", "grad"))


def files_alone(folder: Path, size: int) -> Callable[[], float]:
    """Seconds in which `size` bytes are read and as many written, pieces of both under way at once."""
    files, count = Files(folder, size), max(1, size // PIECE)
    buffers = [aligned(PIECE) for _ in range(2 * DEEP)]
    for number in range(count):
        files.write(number * PIECE, buffers[0]).wait()

    def run() -> float:
        start = time.perf_counter()
        reads, writes = [], []
        for number in range(count):
            reads.append(files.read(number * PIECE, buffers[number % DEEP]))
            if len(reads) == DEEP:
                reads.pop(0).wait()
                writes.append(files.write((number - DEEP + 1) * PIECE, buffers[DEEP + number % DEEP]))
            if len(writes) == DEEP:
                writes.pop(0).wait()
        for ticket in (*reads, *writes):
            ticket.wait()
        return time.perf_counter() - start

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="25M")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--path", type=Path, help="a folder on the disk; default: that of temporary files")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--layout", default="zero1")
    parser.add_argument("--limit", type=int, help="`limit_bytes` of the layout")
    choices = parser.parse_args()
    torch.set_num_threads(choices.threads)
    case = Case(choices.size, "bf16", 1, 1)
    with tempfile.TemporaryDirectory(dir=choices.path) as name:
        trainings = {kind: Training(kind, case, choices.layout, Path(name), choices.limit) for kind in KINDS}
        alone = files_alone(Path(name), trainings["memory"].bytes())
        seconds: list[float] = []
        for number in range(choices.rounds + 1):
            for training in trainings.values():
                training.turn()
            seconds.append(alone())
            if number == 0:  # everything is made at its first use
                seconds.clear()
                for training in trainings.values():
                    training.forward.clear()
                    training.update.clear()
        print(report(choices.size, trainings, seconds))
        for training in trainings.values():
            training.engine.close()


def report(size: str, trainings: dict[str, Training], alone: list[float]) -> str:
    memory = trainings["memory"]
    io = statistics.median(alone)
    compute = statistics.median(memory.update)
    lines = [
        f"{size}: {memory.bytes() / 1e6:.0f} MB of states; alone, files take {1e3 * io:.0f} ms for them, both ways",
        "",
        "| states | forward, backward ms | update ms | step ms | update / bound | step / larger phase | step / larger "
        "| hidden |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, training in trainings.items():
        files = map(min, trainings["files"].update, alone)
        bounds = [max(one, other) for one, other in zip(memory.update, files, strict=True)]
        own = bounds if kind.startswith("files") else memory.update
        update = statistics.median(mine / bound for mine, bound in zip(training.update, own, strict=True))
        steps = [f + u for f, u in zip(training.forward, training.update, strict=True)]
        base = trainings[kind.partition(", ")[0]]
        plain = [f + u for f, u in zip(base.forward, base.update, strict=True)]
        larger = statistics.median(
            step / max(forward, bound) for step, forward, bound in zip(steps, memory.forward, own, strict=True)
        )
        inside = [f + u for f, u in zip(memory.forward, memory.update, strict=True)]
        whole = statistics.median(step / max(one, bound) for step, one, bound in zip(steps, inside, own, strict=True))
        hidden = statistics.median((one - step) / up for one, step, up in zip(plain, steps, base.update, strict=True))
        shown = f"{hidden:.2f}" if ", " in kind else ""
        ms = [1e3 * statistics.median(values) for values in (training.forward, training.update, steps)]
        ratios = f"{update:.2f} | {larger:.2f} | {whole:.2f} | {shown}"
        lines.append(f"| {kind} | {ms[0]:.0f} | {ms[1]:.0f} | {ms[2]:.0f} | {ratios} |")
    lines.append(f"\nupdate in memory {1e3 * compute:.0f} ms")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
