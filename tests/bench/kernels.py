"""dsx's kernels on the CPU against torch's, DeepSpeedCPUAdam, and what the memory of this machine allows.

    python tests/bench/kernels.py [--sizes 1e5,1e7,1e8] [--rounds 15] [--threads 2] [--only OPERATION]
        [--peers-python PATH] [--json OUT]

All ways of an operation take turns, round by round, on the same tensors. The memory bound is measured in the same
rounds: as many bytes as the operation writes are read and written in place, and as many as it reads besides are read.
Lines that are fetched only to be written whole are not counted, since they need not be. All tensors ask for huge pages,
as dsx's buffers do: with small ones rates depend on where these happen to lie.

ms        the least of the rounds, since what else the machine does only ever adds; CPU time with --threads 1
GB/s      bytes read and written in that time
of bound  the memory bound's time, divided by a way's: the median of the rounds
times     how many times as long as dsx's it is: the median of the rounds

DeepSpeed is left out unless --peers-python names an interpreter that has it; it runs there, alone, with a memory bound
of its own, and is compared by what each takes of its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Way = Callable[[], object]

NUMBERS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
BOUND = "memory bound"
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""torch reads it at its first allocation."""


def rounds_of(ways: Mapping[str, Way], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round; the order turns, and a first round is not counted."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds + 1):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = clock()
            ways[name]()
            if number:
                times[name].append(clock() - start)
    return times


def bound(read: int, written: int) -> Way:
    """Reads so many bytes, and writes so many of them back."""
    target, source = torch.zeros(written // 4), torch.zeros(max(0, read - written) // 4)
    return lambda: (target.add_(1e-9), source.sum())


class Tensors:
    """What the ways of all operations share: weights and moments of `count` elements, gradients, 16-bit copies."""

    def __init__(self, count: int) -> None:
        count = count // 1024 * 1024
        self.count = count
        self.master, self.gradient = torch.randn(count), torch.randn(count)
        self.mean, self.square = torch.zeros(count), torch.zeros(count)
        self.half, self.param = self.gradient.bfloat16(), self.master.bfloat16()
        self.wide = torch.zeros(count)
        blocks = count // 1024
        self.left, self.counts = torch.zeros(count), torch.full((blocks,), 1024, dtype=torch.int32)
        self.bits, self.scales = torch.zeros(2, count // 32, dtype=torch.int32), torch.zeros(2, blocks)

    def signs(self) -> None:
        """Error feedback by torch's operations; the signs are not packed."""
        total = (self.gradient + self.left).view(-1, 1024)
        scale = total.abs().mean(1, keepdim=True)
        self.left.copy_((total - torch.where(total < 0, -scale, scale)).view(-1))

    def fused(self, gradient: torch.Tensor) -> None:
        """torch's fused kernel, which a caller gives fp32."""
        one = [torch.tensor(2.0)]
        torch._fused_adamw_(
            [self.master], [gradient], [self.mean], [self.square], [], one,
            lr=1e-3, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    def fused_mixed(self) -> None:
        """The same result by way of torch's: the gradient widened before, the weights rounded after."""
        self.wide.copy_(self.half)
        self.fused(self.wide)
        self.param.copy_(self.master)

    def foreach(self) -> Way:
        weights = torch.nn.Parameter(self.master)
        weights.grad = self.gradient
        optimizer = torch.optim.AdamW([weights], foreach=True, **NUMBERS)
        return optimizer.step


def operations(tensors: Tensors) -> dict[str, tuple[float, float, dict[str, Way]]]:
    """By name: bytes read and written for each element, and the ways; dsx's is the first."""
    from dsx_kernels.accumulate import accumulate
    from dsx_kernels.adamw import adamw
    from dsx_kernels.cast import cast
    from dsx_kernels.lamb import lamb
    from dsx_kernels.lamb.reference import lamb as plain_lamb
    from dsx_kernels.momentum import momentum as average
    from dsx_kernels.sgd import sgd
    from dsx_kernels.signs import signs
    from dsx_kernels.signs_mean import signs_mean
    from dsx_kernels.squares import squares

    t = tensors
    update: dict[str, Any] = {**NUMBERS, "step": 2}
    momentum: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9}
    after_freeze: dict[str, Any] = {**NUMBERS, "least": 0.01}
    del after_freeze["lr"]
    weights = torch.nn.Parameter(t.master)
    weights.grad = t.gradient
    fused_sgd = torch.optim.SGD([weights], fused=True, **momentum)
    return {
        "adamw fp32": (16, 12, {
            "dsx": lambda: adamw(t.gradient, t.master, t.mean, t.square, **update),
            "torch fused": lambda: t.fused(t.gradient),
            "torch foreach": t.foreach(),
        }),
        "adamw bf16 in, bf16 out": (14, 14, {
            "dsx": lambda: adamw(t.half, t.master, t.mean, t.square, param=t.param, **update),
            "torch fused": t.fused_mixed,
        }),
        "sgd fp32, momentum": (12, 8, {
            "dsx": lambda: sgd(t.gradient, t.master, t.mean, step=2, **momentum),
            "torch fused": fused_sgd.step,
        }),
        "cast fp32 to bf16": (4, 2, {
            "dsx": lambda: cast(t.gradient, t.param),
            "torch copy_": lambda: t.param.copy_(t.gradient),
        }),
        "cast bf16 to fp32": (2, 4, {
            "dsx": lambda: cast(t.half, t.wide),
            "torch copy_": lambda: t.wide.copy_(t.half),
        }),
        "accumulate bf16 into fp32": (6, 4, {
            "dsx": lambda: accumulate(t.wide, t.half, 0.5),
            "torch add_": lambda: t.wide.add_(t.half, alpha=0.5),
        }),
        "signs fp32": (8, 4.13, {
            "dsx": lambda: signs(t.gradient, t.left, t.counts, t.bits[0], t.scales[0]),
            "torch operations": t.signs,
        }),
        "signs fp32, of a bf16 gradient's share": (14, 4.13, {
            "dsx": lambda: signs(t.mean, t.left, t.counts, t.bits[0], t.scales[0], t.half, t.square, beta=0.9),
        }),
        "signs_mean of 1 rank": (0.13, 4, {"dsx": lambda: signs_mean(t.bits[:1], t.scales[:1], t.counts, t.wide)}),
        "signs_mean of 2 ranks": (0.26, 4, {"dsx": lambda: signs_mean(t.bits, t.scales, t.counts, t.wide)}),
        "momentum fp32, with a factor": (12, 4, {"dsx": lambda: average(t.mean, t.gradient, t.square, beta=0.9)}),
        "lamb fp32": (20, 8, {
            "dsx": lambda: lamb(t.gradient, t.mean, t.square, t.wide, t.master, **after_freeze),
            "torch operations": lambda: plain_lamb(t.gradient, t.mean, t.square, t.wide, t.master, **after_freeze),
        }),
        "squares fp32": (4, 0, {
            "dsx": lambda: squares(t.gradient),
            "torch norm": lambda: torch.linalg.vector_norm(t.gradient),
            "torch isfinite().all() and norm": lambda: (t.gradient.isfinite().all(), t.gradient.norm()),
        }),
        "squares bf16": (2, 0, {
            "dsx": lambda: squares(t.half),
            "torch norm": lambda: torch.linalg.vector_norm(t.half),
            "torch isfinite().all() and norm": lambda: (t.half.isfinite().all(), t.half.norm()),
        }),
    }  # fmt: skip


def measure(count: int, rounds: int, only: str) -> list[dict[str, Any]]:
    """One record for each way of each operation whose name begins so."""
    records = []
    for operation, (read, written, ways) in operations(Tensors(count)).items():
        if not operation.startswith(only):
            continue
        records += compare(operation, ways, count, round(read * count), round(written * count), rounds)
    return records


def compare(
    operation: str, ways: Mapping[str, Way], count: int, read: int, written: int, rounds: int
) -> list[dict[str, Any]]:
    """A record for each way and one for the bound; the first way is what the others are held against."""
    times = rounds_of({**ways, BOUND: bound(read, written)}, rounds)
    own = times[next(iter(ways))]
    return [
        {
            "operation": operation,
            "way": way,
            "elements": count,
            "ms": min(took) * 1e3,
            "gbs": (read + written) / min(took) / 1e9,
            "of_bound": ratio(times[BOUND], took),
            "times": ratio(took, own),
            "huge": huge(),
        }
        for way, took in times.items()
    ]


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over the rounds."""
    return statistics.median(one / other for one, other in zip(times, others, strict=True))


def deepspeed(count: int, rounds: int) -> list[dict[str, Any]]:
    """DeepSpeedCPUAdam, alone: in fp32, and with what a bf16 gradient and parameter take besides."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

    weights, gradient = torch.nn.Parameter(torch.randn(count)), torch.randn(count)
    half, param = gradient.bfloat16(), weights.data.bfloat16()
    weights.grad = gradient
    optimizer = DeepSpeedCPUAdam([weights], adamw_mode=True, **NUMBERS)

    def mixed() -> None:
        gradient.copy_(half)
        optimizer.step()
        param.copy_(weights.data)

    records = []
    for operation, read, written, way in (
        ("adamw fp32", 16, 12, optimizer.step),
        ("adamw bf16 in, bf16 out", 14, 14, mixed),
    ):
        found, _ = compare(operation, {"DeepSpeedCPUAdam": way}, count, read * count, written * count, rounds)
        records.append({**found, "times": None})
    return records


def of_peer(python: str, count: int, choices: argparse.Namespace) -> list[dict[str, Any]]:
    """What an interpreter with DeepSpeed measures."""
    command = [python, __file__, "--deepspeed", "--sizes", str(count), "--rounds", str(choices.rounds)]
    done = subprocess.run([*command, "--threads", str(choices.threads)], stdout=subprocess.PIPE, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def huge() -> float:
    """The share of the process's own memory that lies in huge pages; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    return sizes.get("AnonHugePages", 0) / max(1, sizes.get("Anonymous", 0))


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table."""
    lines = ["| elements | operation | way | ms | GB/s | of bound | times |", "|---|---|---|---|---|---|---|"]
    for row in records:
        times = "" if row["times"] is None or row["way"] == BOUND else f"{row['times']:.2f}"
        lines.append(
            f"| {row['elements']:.0e} | {row['operation']} | {row['way']} | {row['ms']:.3f} | {row['gbs']:.1f} | "
            f"{row['of_bound']:.2f} | {times} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes", type=lambda text: [int(float(part)) for part in text.split(",")], default="1e5,1e7,1e8"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", metavar="OPERATION", help="operations whose names begin so")
    parser.add_argument("--peers-python", metavar="PATH")
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    choices = parser.parse_args()
    os.environ[HUGE_PAGES] = "1"
    torch.set_num_threads(choices.threads)
    if choices.deepspeed:
        print(json.dumps([record for count in choices.sizes for record in deepspeed(count, choices.rounds)]))
        return
    from dsx_kernels import library

    records = []
    for count in choices.sizes:
        records += measure(count, choices.rounds, choices.only)
        records += of_peer(choices.peers_python, count, choices) if choices.peers_python else []
    records.sort(key=lambda row: (row["elements"], row["operation"]))
    machine = platform.processor() or platform.machine()
    pages = f"{records[-1]['huge']:.0%} of memory in huge pages"
    print(f"{machine}, {library.instructions()}, {choices.threads} threads, {pages}\n")
    print(table(records))
    if choices.json:
        choices.json.write_text(json.dumps(records))


if __name__ == "__main__":
    main()
