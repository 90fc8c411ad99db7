"""Kills a run with SIGKILL at random instants, resumes it, and compares its loss curve with an uninterrupted one's.

    python tests/faults/kill.py [--times 20] [--nproc 2] [--seed 0]

The run writes a checkpoint after every update. Each time the launcher, or one of its ranks, is killed; then `--resume`
goes on to the end, or to the next kill. The curve must be the uninterrupted one's, bit for bit, and every checkpoint
left must load. The first run and every other one after it have their gradients and optimizer states in files, of which
nothing may be left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

STEPS = 40
MANIFEST = """
[run]
name = "kill"
steps = {steps}
[batch]
global = 4
[model]
factory = "dsx_text:gpt"
layers = 1
width = 16
heads = 2
context = 16
dropout = 0.1
[data]
source = "dsx_text:files"
files = "{corpus}"
context = 16
cache = "{cache}"
[partition]
use = ["zero2"]
[optimize]
use = ["adamw", "warmup_cosine"]
clip_norm = 1.0
[checkpoint]
every = 1
[observe]
use = ["jsonl"]
"""


class Run:
    """One run folder, trained in as many attempts as it takes."""

    def __init__(self, folder: Path, nproc: int, disk: Path | None = None) -> None:
        self.folder, self.nproc, self.disk = folder, nproc, disk
        self.manifest = folder.parent / "run.toml"

    def start(self, resume: bool) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "dsx", "run", str(self.manifest), "--nproc", str(self.nproc)]
        command += ["--set", f"run.out={self.folder}", *(["--resume"] if resume else [])]
        if self.disk is not None:
            command += ["--set", 'partition.use=["zero2", "nvme_offload"]']
            command += ["--set", 'partition.nvme_offload.states=["optimizer", "grad"]']
            command += ["--set", f"partition.nvme_offload.path={self.disk}"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def finish(self, resume: bool) -> str:
        process = self.start(resume)
        text, _ = process.communicate(timeout=300)
        if process.returncode:
            raise AssertionError(f"the run failed with {process.returncode}:\n{text}")
        return text

    def updates(self) -> int:
        return len(self.losses())

    def losses(self) -> dict[int, float]:
        """By update; of several attempts at one, the last."""
        found: dict[int, float] = {}
        path = self.folder / "metrics.jsonl"
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # cut by the kill
            if record.get("kind") == "update":
                found[record["step"]] = record["loss"]
        return found

    def resumes(self) -> bool:
        return (self.folder / "checkpoints" / "latest").exists()

    def kill(self, chance: random.Random, until: int) -> int:
        """Start it, or go on, and kill the launcher or a rank soon after update `until`; the updates made by then."""
        process = self.start(self.resumes())
        while self.updates() < until and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.1)
        ranks = children(process.pid)
        victim = chance.choice([process.pid, *ranks])
        os.kill(victim, signal.SIGKILL)
        process.communicate(timeout=60)
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in ranks):
            if time.monotonic() > deadline:
                raise AssertionError(f"ranks {ranks} outlive the launcher")
            time.sleep(0.05)
        return self.updates()


def children(pid: int) -> list[int]:
    """Every process below `pid`."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def prepare(folder: Path) -> None:
    """A corpus and a manifest of its own."""
    corpus = folder / "corpus.txt"
    words = random.Random(1)
    corpus.write_text(" ".join(words.choice(["one", "two", "three", "seven", "and", "or"]) for _ in range(4000)))
    text = MANIFEST.format(steps=STEPS, corpus=corpus, cache=folder / "cache")
    (folder / "run.toml").write_text(text)


def check(times: int, nproc: int, seed: int, each: int = 1) -> list[int]:
    """Kill and resume runs, `each` so often, until there were `times` kills; the updates at which they came."""
    chance, killed = random.Random(seed), []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        whole = Run(folder / "whole", nproc)
        whole.finish(resume=False)
        expected = whole.losses()
        assert sorted(expected) == list(range(1, STEPS + 1))
        for number in range(times // each):
            run = Run(folder / f"killed{number}", nproc, None if number % 2 else folder / "disk")
            instants = sorted(chance.randrange(0, STEPS - 5) for _ in range(each))
            killed += [run.kill(chance, until) for until in instants]
            run.finish(run.resumes())
            found = run.losses()
            assert found == expected, f"after kills at updates {killed[-each:]} the curve differs"
            first, second = (load_file(r.folder / "model.safetensors") for r in (whole, run))
            assert first.keys() == second.keys()
            assert all(torch.equal(tensor, second[name]) for name, tensor in first.items()), "the weights differ"
            left = [path.name for path in (run.folder / "checkpoints").iterdir()]
            assert run.disk is None or list(run.disk.iterdir()) == [], "files of states are left"
            assert sorted(left) == ["latest", *(f"step-{STEPS - back:08d}" for back in (2, 1, 0))], left
    return killed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    choices = parser.parse_args()
    killed = check(choices.times, choices.nproc, choices.seed)
    print(f"{len(killed)} runs killed at updates {killed}: every curve and every weight as uninterrupted")


if __name__ == "__main__":
    main()
