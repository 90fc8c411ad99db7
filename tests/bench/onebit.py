"""What 1-bit updates save on a slow link, and what they cost of the loss.

    python tests/bench/onebit.py times [--links none,1000,400,200,100] [--size 25M] [--rounds 8]
    python tests/bench/onebit.py losses [--steps 3000] [--seeds 0,1,2] [--beta2 0.99] [--layers 4] [--width 256]

times   bf16 on two ranks, each in a network namespace as on a host of its own, joined by a link of so many Mbit/s each
        way; by partition.py, so systems take turns. `onebit_adam` is frozen after its first update: all that is timed
        is compressed. "R" is what the all-reduce adds to a step without a limit, over that step; "formula"
        (1 + R) / (1 + R / 16 + 0.1) of it. Times are ratios to the all-reduce after backward in the same run
losses  a GPT on Python's own sources on two ranks: adamw, and onebit_adam with a fixed freeze at 14 % and with the
        variance's own; held-out loss at the end, and bytes of the whole run against bf16's all-reduce
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
AFTER, OVERLAPPED, ONEBIT, ZERO1 = "dsx-after-backward", "dsx-replicated", "dsx-onebit", "dsx-onebit-zero1"
SYSTEMS = (AFTER, OVERLAPPED, ONEBIT, ZERO1)


def times(choices: argparse.Namespace) -> None:
    """A table with a row for each link and system."""
    print("| link, Mbit/s | system | time / after backward | sent MB a rank | R | formula |\n|---|---|---|---|---|---|")
    free: float | None = None
    for link in choices.links.split(","):
        found = _partition(choices, [] if link == "none" else ["--link", link])
        walls = {name: statistics.median(found[name]["wall"]) for name in SYSTEMS}
        free = walls[AFTER] if free is None else free
        ratio = max(0.0, walls[AFTER] / free - 1)
        for name in SYSTEMS:
            shares = [one / other for one, other in zip(found[name]["wall"], found[AFTER]["wall"], strict=True)]
            sent = [count / 1e6 for count in found[name]["sent"] if count is not None]
            cells = [link, name, f"{statistics.median(shares):.2f}", f"{statistics.mean(sent):.2f}" if sent else "-"]
            cells += [f"{ratio:.2f}", f"{formula(ratio):.2f}"] if name == ONEBIT else ["", ""]
            print(f"| {' | '.join(cells)} |", flush=True)


def formula(ratio: float) -> float:
    """How many times as fast a step is whose exchange takes 1/16 of `ratio` computations, and 0.1 for the signs."""
    return (1 + ratio) / (1 + ratio / 16 + 0.1)


def _partition(choices: argparse.Namespace, link: Sequence[str]) -> dict[str, Any]:
    """Records of partition.py, by system."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(BENCH / "partition.py"), "--systems", ",".join(SYSTEMS), "--dtype", "bf16"]
        command += ["--size", choices.size, "--rounds", str(choices.rounds), "--sockets", "--json", str(out), *link]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        found: dict[str, Any] = json.loads(out.read_text())["systems"]
    failed = {name: record["failed"] for name, record in found.items() if "failed" in record}
    if failed:
        raise SystemExit(f"failed: {failed}")
    return found


def losses(choices: argparse.Namespace) -> None:
    """A table with a row for each way and seed."""
    print(
        "| seed | optimizer | frozen after | held-out loss | against adamw | bytes / bf16's |\n" + "|---" * 6 + "|",
    )
    fixed = round(0.14 * choices.steps)
    for seed in choices.seeds.split(","):
        base: float | None = None
        for name, freeze in (("adamw", None), ("onebit_adam", fixed), ("onebit_adam", None)):
            loss, frozen = _train(choices, int(seed), name, freeze)
            base = loss if base is None else base
            part = (frozen + (choices.steps - frozen) / 15.5) / choices.steps
            cells = [
                seed,
                name,
                str(frozen) if name != "adamw" else "",
                f"{loss:.4f}",
                f"{100 * (loss / base - 1):+.2f} %",
            ]
            print(f"| {' | '.join([*cells, f'{part:.3f}'])} |", flush=True)


def _train(choices: argparse.Namespace, seed: int, name: str, freeze: int | None) -> tuple[float, int]:
    """The held-out loss of a run on two ranks, and after which update only signs travelled (steps: never)."""
    options = f"lr = 2e-3\nbetas = [0.9, {choices.beta2}]\nweight_decay = 0.1\n" + (
        f"freeze = {freeze}\n" if freeze else ""
    )
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "run.toml"
        manifest.write_text(_MANIFEST.format(**vars(choices), seed=seed, name=name, options=options, out=folder))
        command = [sys.executable, "-m", "dsx", "run", str(manifest), "--nproc", "2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = [json.loads(line) for line in next(Path(folder).rglob("metrics.jsonl")).read_text().splitlines()]
        rule = json.loads(next(Path(folder).rglob("dsx.json")).read_text())["engine"]["rule"]
    loss = [line["loss"] for line in lines if line["kind"] == "evaluation"][-1]
    return loss, rule.get("frozen") or choices.steps


_MANIFEST = """
[run]
steps = {steps}
seed = {seed}
out = "{out}/run"
[batch]
global = 8
[model]
factory = "dsx_text:gpt"
layers = {layers}
width = {width}
heads = 4
context = 128
[data]
source = "dsx_text:files"
files = "stdlib"
context = 128
[precision]
use = ["bf16"]
[optimize]
use = ["{name}", "warmup_cosine"]
clip_norm = 1.0
[optimize.{name}]
{options}
[optimize.warmup_cosine]
warmup = 0.03
[evaluate]
every = {steps}
samples = 512
[checkpoint]
every = {steps}
[observe]
use = ["jsonl"]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    of_times = parts.add_parser("times")
    of_times.add_argument("--links", default="none,1000,400,200,100")
    of_times.add_argument("--size", default="25M")
    of_times.add_argument("--rounds", type=int, default=8)
    of_losses = parts.add_parser("losses")
    of_losses.add_argument("--steps", type=int, default=3000)
    of_losses.add_argument("--seeds", default="0,1,2")
    of_losses.add_argument("--beta2", type=float, default=0.99)
    of_losses.add_argument("--layers", type=int, default=4)
    of_losses.add_argument("--width", type=int, default=256)
    choices = parser.parse_args()
    (times if choices.part == "times" else losses)(choices)


if __name__ == "__main__":
    main()
