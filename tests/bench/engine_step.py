"""The engine's step against a hand-written loop of plain PyTorch, alternating in one process.

    python tests/bench/engine_step.py [--rounds 60] [--threads 2]

Both train the same GPT from the same weights on the same batches with the same kernel (torch's fused AdamW); losses
must agree bit for bit. Printed: the median of the per-step ratios dsx / loop, and its quartiles.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import dsx
from dsx_text import gpt

SIZES = {
    "0.8 M": {"layers": 4, "width": 128, "heads": 4, "context": 256},
    "25 M": {"layers": 8, "width": 512, "heads": 8, "context": 256},
}


def batch(step: int, samples: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, 256, (samples, length + 1), generator=generator)
    return {"input_ids": words[:, :-1].contiguous(), "labels": words[:, 1:].contiguous()}


def loop(model: torch.nn.Module) -> Callable[[dict[str, Tensor]], float]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step(words: dict[str, Tensor]) -> float:
        loss = model(**words)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return step


def engine(model: torch.nn.Module) -> Callable[[dict[str, Tensor]], float]:
    made = dsx.prepare(model)

    def step(words: dict[str, Tensor]) -> float:
        made.backward(made(**words))
        return float(made.step().loss or 0.0)

    return step


def compare(size: str, samples: int, length: int, rounds: int) -> None:
    torch.manual_seed(0)
    model = gpt(**SIZES[size])
    steps = {"loop": loop(copy.deepcopy(model)), "dsx": engine(model)}
    ratios, times = [], {"loop": [], "dsx": []}
    for number in range(rounds + 5):
        words, losses, took = batch(number, samples, length), {}, {}
        for name in sorted(steps, reverse=number % 2 == 0):
            gc.collect()
            started = time.perf_counter()
            losses[name] = steps[name](words)
            took[name] = time.perf_counter() - started
        assert losses["loop"] == losses["dsx"], (number, losses)
        if number >= 5:
            ratios.append(took["dsx"] / took["loop"])
            for name, seconds in took.items():
                times[name].append(seconds)
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = ", ".join(f"{name} {statistics.median(seconds) * 1e3:.1f} ms" for name, seconds in times.items())
    print(f"{size:6} {samples} x {length} tokens: ratio {middle:.3f} ({low:.3f}-{high:.3f}); {medians}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    choices = parser.parse_args()
    torch.set_num_threads(choices.threads)
    compare("0.8 M", 8, 256, choices.rounds)
    compare("0.8 M", 1, 64, choices.rounds)
    compare("25 M", 2, 256, max(10, choices.rounds // 2))


if __name__ == "__main__":
    main()
