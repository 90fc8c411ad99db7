"""What 1-bit updates save on a slow link, and what they cost of the loss.

    python tests/bench/onebit.py times [--links none,1000,400,200,100,none/1,1000/1,100/1] [--size 25M] [--rounds 8]
    python tests/bench/onebit.py runs [--links 200,80] [--size 25M]
    python tests/bench/onebit.py losses [--steps 3000] [--seeds 0,1,2] [--ways "adamw;onebit_adam"] [--beta2 0.99]
        [--lr 2e-3] [--layers 4] [--width 256]

times   bf16 on two ranks, each in a network namespace as on a host of its own, joined by a link of so many Mbit/s each
        way, /1 with 1 ms of latency more; by partition.py, so systems take turns. The variance is frozen after the
        first update: all that is timed is compressed. Of `zero_one_adam` an update with an exchange and one between
        two of them are timed apart: with one in H updates a mean update takes (first + (H - 1) second) / H. "R" is
        what the all-reduce adds to a step without a limit, over that step; "formula" (1 + R) / (1 + R / 16 + 0.1) of
        it. Times are ratios to the all-reduce after backward in the same run, and to the same optimizer and layout
        without compression
runs    50 updates of onebit_adam, of which the first 7 come before the freeze (14 %) and are the ordinary, overlapped
        reduction: the time of all of them over that of bf16 AdamW with the all-reduce after backward, on such links
losses  a GPT on Python's own sources on two ranks: adamw; onebit_adam with a fixed freeze at 14 % and with the
        variance's own; zero_one_adam whose variance is frozen at 14 %, and which then meets after 1, 2 and 4 updates;
        lamb as onebit_lamb without a freeze, and onebit_lamb with one at 14 %. Held-out loss at the end, against the
        first of each family, and bytes of the whole run against bf16's all-reduce. --ways names some of them
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
AFTER, ONEBIT = "dsx-after-backward", "dsx-onebit"
PEERS = {
    ONEBIT: "dsx-replicated",
    "dsx-onebit-01": "dsx-replicated",
    "dsx-onebit-01-apart": "dsx-replicated",
    "dsx-onebit-zero1": "dsx-zero1",
    "dsx-onebit-lamb": "dsx-lamb",
    "dsx-onebit-lamb-zero1": "dsx-lamb-zero1",
}
"""The same training in bf16, overlapped."""
SYSTEMS = (AFTER, *dict.fromkeys(PEERS.values()), *PEERS)
RUN, UPDATES, WARM_UP = "dsx-onebit-run", 50, 7
"""A system that freezes its variance after so many of the steps that are measured."""


def times(choices: argparse.Namespace) -> None:
    """A table with a row for each link and system."""
    print("| link, Mbit/s / ms | system | time / after backward | / its own in bf16 | sent MB a rank | R | formula |")
    print("|---|---|---|---|---|---|---|")
    free: float | None = None
    for link in choices.links.split(","):
        mbit, _, latency = link.partition("/")
        limit = [] if mbit == "none" else ["--link", mbit]
        link_options = [*limit, *(["--latency", latency] if latency else [])]
        found = _partition(SYSTEMS, choices.size, choices.rounds, link_options)
        walls = {name: statistics.median(found[name]["wall"]) for name in SYSTEMS}
        free = walls[AFTER] if free is None else free
        ratio = max(0.0, walls[AFTER] / free - 1)
        for name in SYSTEMS:
            shares = _shares(found, name, AFTER)
            own = f"{_shares(found, name, PEERS[name]):.2f}" if name in PEERS else ""
            sent = [count / 1e6 for count in found[name]["sent"] if count is not None]
            cells = [link, name, f"{shares:.2f}", own, f"{statistics.mean(sent):.2f}" if sent else "-"]
            cells += [f"{ratio:.2f}", f"{formula(ratio):.2f}"] if name == ONEBIT else ["", ""]
            print(f"| {' | '.join(cells)} |", flush=True)


def _shares(found: dict[str, Any], name: str, other: str) -> float:
    """Median over the rounds of a system's time over another's."""
    return statistics.median(a / b for a, b in zip(found[name]["wall"], found[other]["wall"], strict=True))


def formula(ratio: float) -> float:
    """How many times as fast a step is whose exchange takes 1/16 of `ratio` computations, and 0.1 for the signs."""
    return (1 + ratio) / (1 + ratio / 16 + 0.1)


def runs(choices: argparse.Namespace) -> None:
    """A table with a row for each link."""
    free = statistics.median(_partition([AFTER], choices.size, 20, [])[AFTER]["wall"])
    print("| link, Mbit/s | R | times as fast, all updates | of which after the freeze |\n|---|---|---|---|")
    for link in choices.links.split(","):
        found = _partition([AFTER, RUN], choices.size, UPDATES, ["--link", link])
        plain, ours = (found[name]["wall"] for name in (AFTER, RUN))
        assert len(plain) == len(ours) == UPDATES
        every, late = sum(plain) / sum(ours), sum(plain[WARM_UP:]) / sum(ours[WARM_UP:])
        print(f"| {link} | {statistics.median(plain) / free - 1:.2f} | {every:.2f} | {late:.2f} |", flush=True)


def _partition(names: Sequence[str], size: str, rounds: int, link: Sequence[str]) -> dict[str, Any]:
    """Records of partition.py, by system."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(BENCH / "partition.py"), "--systems", ",".join(names), "--dtype", "bf16"]
        command += ["--size", size, "--rounds", str(rounds), "--sockets", "--json", str(out), *link]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if not out.exists():
            raise SystemExit(f"partition.py ended with {done.returncode}")
        found: dict[str, Any] = json.loads(out.read_text())["systems"]
    failed = {name: record["failed"] for name, record in found.items() if "failed" in record}
    if failed:
        raise SystemExit(f"failed: {failed}")
    return found


@dataclass(frozen=True)
class Way:
    """An optimizer and its options: `lasts` updates are made.

    against  the way that it is compared with
    """

    rule: str
    options: Callable[[int], dict[str, int | float]] = lambda lasts: {}
    against: str = "adamw"


def _freeze(lasts: int) -> int:
    return round(0.14 * lasts)


WAYS = {
    "adamw": Way("adamw"),
    "onebit_adam": Way("onebit_adam", lambda lasts: {"freeze": _freeze(lasts)}),
    "onebit_adam, by the variance": Way("onebit_adam"),
    "zero_one_adam": Way(
        "zero_one_adam",
        lambda lasts: {"freeze": _freeze(lasts), "local_scale": (lasts - _freeze(lasts)) // 3, "local_limit": 4},
    ),
    "lamb": Way("onebit_lamb", lambda lasts: {"freeze": lasts + 1, "lr": 2e-2}, "lamb"),
    "onebit_lamb": Way("onebit_lamb", lambda lasts: {"freeze": _freeze(lasts), "lr": 2e-2}, "lamb"),
}


def losses(choices: argparse.Namespace) -> None:
    """A table with a row for each way and seed."""
    print("| seed | optimizer | frozen after | held-out loss | against | bytes / bf16's |\n" + "|---" * 6 + "|")
    for seed in choices.seeds.split(","):
        ended: dict[str, float] = {}
        for name in choices.ways.split(";") if choices.ways else WAYS:
            way = WAYS[name]
            options = {"lr": choices.lr, **way.options(choices.steps)}
            ended[name], frozen = _train(choices, int(seed), way.rule, options)
            base = ended.get(way.against)
            more = f"{100 * (ended[name] / base - 1):+.2f} % of {way.against}" if base and name != way.against else ""
            part = _bytes(way.rule, options, frozen, choices.steps)
            cells = [seed, name, str(frozen) if frozen < choices.steps else "", f"{ended[name]:.4f}", more]
            print(f"| {' | '.join([*cells, f'{part:.3f}'])} |", flush=True)


def _bytes(rule: str, options: dict[str, int | float], frozen: int, steps: int) -> float:
    """Of a run, over those of bf16's all-reduce in each update, of which signs take 1/15.5."""
    if rule != "zero_one_adam":
        return (frozen + (steps - frozen) / 15.5) / steps
    from dsx_onebit.intervals import meets, renews

    scale, limit = int(options["local_scale"]), int(options["local_limit"])
    looks = sum(renews(step, 16) for step in range(1, frozen + 1))
    meetings = sum(meets(step, frozen, scale, limit) for step in range(frozen + 1, steps + 1))
    return (looks + (frozen - looks + meetings) / 15.5) / steps


def _train(choices: argparse.Namespace, seed: int, name: str, numbers: dict[str, int | float]) -> tuple[float, int]:
    """The held-out loss of a run on two ranks, and after which update the variance was frozen (steps: never)."""
    options = f"betas = [0.9, {choices.beta2}]\nweight_decay = 0.1\n"
    options += "".join(f"{key} = {value}\n" for key, value in numbers.items())
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / "run.toml"
        manifest.write_text(_MANIFEST.format(**vars(choices), seed=seed, name=name, options=options, out=folder))
        command = [sys.executable, "-m", "dsx", "run", str(manifest), "--nproc", "2"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = [json.loads(line) for line in next(Path(folder).rglob("metrics.jsonl")).read_text().splitlines()]
        rule = json.loads(next(Path(folder).rglob("dsx.json")).read_text())["engine"]["rule"]
    loss = [line["loss"] for line in lines if line["kind"] == "evaluation"][-1]
    frozen = numbers["freeze"] if name == "zero_one_adam" else rule.get("frozen") or choices.steps
    return loss, int(frozen)


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
    of_times.add_argument("--links", default="none,1000,400,200,100,none/1,1000/1,100/1")
    of_times.add_argument("--size", default="25M")
    of_times.add_argument("--rounds", type=int, default=8)
    of_runs = parts.add_parser("runs")
    of_runs.add_argument("--links", default="200,80")
    of_runs.add_argument("--size", default="25M")
    of_losses = parts.add_parser("losses")
    of_losses.add_argument("--steps", type=int, default=3000)
    of_losses.add_argument("--seeds", default="0,1,2")
    of_losses.add_argument("--ways", help=f"separated by ;, of {'; '.join(WAYS)}")
    of_losses.add_argument("--beta2", type=float, default=0.99)
    of_losses.add_argument("--lr", type=float, default=2e-3, help="of all but lamb")
    of_losses.add_argument("--layers", type=int, default=4)
    of_losses.add_argument("--width", type=int, default=256)
    choices = parser.parse_args()
    {"times": times, "runs": runs, "losses": losses}[choices.part](choices)


if __name__ == "__main__":
    main()
