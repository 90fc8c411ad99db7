"""Precisions against torch.autocast: time of a step, and the loss after 300 steps on real text.

    python tests/bench/precision.py speed [--rounds 20] [--ranks 2] [--tokens 2x128] [--half bf16]
    python tests/bench/precision.py quality [--steps 300] [--folder FOLDER]

speed    the 25 M GPT under fused AdamW and clipping: 16-bit parameters with fp32 masters against fp32 parameters under
         autocast (with GradScaler for fp16, and DistributedDataParallel on several ranks), alternating in one process;
         beside it dsx with the attention `dense`, and the 16-bit model's forward and backward with neither update nor
         exchange, which is what is left to an optimizer that costs nothing.
         Printed: the median of the ratios to autocast of each round, and its quartiles
quality  the model of the quickstart on Python's own sources, from the same weights on the same samples: held-out loss
         after each precision's training, against fp32's
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from dsx.run.job import run
from dsx.testing.ranks import Ranks
from dsx_text import gpt

SIZE = {"layers": 8, "width": 512, "heads": 8, "context": 256}
CLIP = 1.0
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PRECISIONS = {
    "fp32": ["fp32"],
    "bf16": ["bf16"],
    "fp16": ["fp16", "dynamic_loss_scale"],
    "autocast": ["autocast"],
}
QUICKSTART = Path(__file__).parents[2] / "docs" / "manifests" / "quickstart.toml"
Step = Callable[[dict[str, Tensor]], object]


def batch(step: int, samples: int, length: int) -> dict[str, Tensor]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(0, 256, (samples, length + 1), generator=generator)
    return {"input_ids": words[:, :-1].contiguous(), "labels": words[:, 1:].contiguous()}


def autocast(model: nn.Module, half: str) -> Step:
    """fp32 parameters, autocast, GradScaler where it is needed, fused AdamW."""
    trained: nn.Module = nn.parallel.DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=half == "fp16")

    def step(words: dict[str, Tensor]) -> None:
        with torch.autocast("cpu", HALVES[half]):
            loss = trained(**words)["loss"]
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def ours(model: nn.Module, half: str, attention: list[str]) -> Step:
    """16-bit parameters, fp32 masters, AdamW."""
    optimize = {"use": ["adamw"], "clip_norm": CLIP}
    precision = {"use": PRECISIONS[half]}
    engine = dsx.prepare(model, {"precision": precision, "optimize": optimize, "attention": {"use": attention}})

    def step(words: dict[str, Tensor]) -> None:
        engine.backward(engine(**words))
        engine.step()

    return step


def alone(model: nn.Module, half: str) -> Step:
    """16-bit parameters that are never updated. Not for fp16: torch multiplies that many times slower on a CPU."""
    model.to(HALVES[half])

    def step(words: dict[str, Tensor]) -> None:
        model(**words)["loss"].backward()
        model.zero_grad()

    return step


def measure(half: str, samples: int, length: int, rounds: int, threads: int) -> list[dict[str, float]]:
    """Seconds of each in each round, on one rank."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model = gpt(**SIZE)
    steps = {
        "autocast": autocast(copy.deepcopy(model), half),
        "dsx": ours(copy.deepcopy(model), half, []),
        "dsx, dense": ours(copy.deepcopy(model), half, ["dense"]),
    }
    if half == "bf16":
        steps["no update"] = alone(model, half)
    found = []
    for number in range(rounds + 2):
        words, took = batch(number, samples, length), {}
        for name in sorted(steps, reverse=number % 2 == 0):
            gc.collect()
            if dist.is_initialized():
                dist.barrier()
            started = time.perf_counter()
            steps[name](words)
            took[name] = time.perf_counter() - started
        if number >= 2:
            found.append(took)
    return found


def speed(choices: argparse.Namespace) -> None:
    samples, length = map(int, choices.tokens.split("x"))
    arguments = choices.half, samples, length, choices.rounds
    if choices.ranks == 1:
        found = measure(*arguments, threads=choices.threads)
    else:
        from precision import measure as on_rank  # ranks import it by name, and this is __main__

        with Ranks() as pool:
            found = pool.run(on_rank, *arguments, threads=1, world=choices.ranks, timeout=1800)[0]
    print(f"{choices.half}, {choices.ranks} rank{'s' if choices.ranks > 1 else ''}, {choices.tokens} tokens each")
    for name in found[0]:
        low, middle, high = statistics.quantiles([took[name] / took["autocast"] for took in found], n=4)
        median = statistics.median(took[name] for took in found) * 1e3
        print(f"  {name:10} {median:6.0f} ms   {middle:.3f} ({low:.3f}-{high:.3f}) of autocast", flush=True)


def quality(choices: argparse.Namespace) -> None:
    torch.set_num_threads(choices.threads)
    folder = Path(choices.folder or tempfile.mkdtemp(prefix="dsx-precision-"))
    losses: dict[str, float] = {}
    for name in choices.half.split(",") if choices.half else PRECISIONS:
        overrides: list[Any] = [f"run.steps={choices.steps}", f'run.out="{folder / name}"', "observe.use=[]"]
        overrides += [f"batch.global={choices.samples}", f"run.seed={choices.seed}"]
        overrides += [f"precision.use={PRECISIONS[name]}".replace("'", '"'), f"evaluate.every={choices.steps}"]
        started = time.perf_counter()
        summary = run(str(QUICKSTART), overrides, overwrite=True)
        assert summary.after is not None
        losses[name] = summary.after.loss
        against = losses[name] / losses.get("fp32", losses[name]) - 1
        took = time.perf_counter() - started
        text = f"{name:9} {losses[name]:.4f} nats a byte ({against:+.2%}), {summary.skips} skips, {took:.0f} s"
        print(text, flush=True)
    apart = [name for name, loss in losses.items() if abs(loss / losses.get("fp32", loss) - 1) > 0.01]
    if apart:
        sys.exit(f"{', '.join(apart)}: more than 1 % from fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "quality"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2, help="of a single rank")
    parser.add_argument("--samples", type=int, default=8, help="of an update of quality")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", default="2x128", help="samples x length, on each rank")
    parser.add_argument("--half", help="bf16 or fp16; of quality, several by commas")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=7, help="of quality")
    parser.add_argument("--folder", help="for the runs of quality")
    choices = parser.parse_args()
    if choices.what == "quality":
        quality(choices)
        return
    choices.half = choices.half or "bf16"
    speed(choices)


if __name__ == "__main__":
    main()
