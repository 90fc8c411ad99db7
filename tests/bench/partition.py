"""Layouts against DistributedDataParallel and FSDP2, all alternating step by step in the same ranks.

    python tests/bench/partition.py [--nproc 2] [--rounds 20] [--accumulation 1]

Every system trains the same GPT from the same weights on the same batches with AdamW in fp32; losses agree to 1e-4.
Printed: the median over steps of each system's time as a multiple of DistributedDataParallel's in the same round, with
quartiles, and the process's CPU time a step. `ddp again` is the control and should read 1.00.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from dsx_text import gpt

Step = Callable[[list[dict[str, Tensor]]], float]
RATE = 3e-4


def batch(step: int, micro: int, samples: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
    words = torch.randint(0, 256, (samples, length + 1), generator=generator)
    return {"input_ids": words[:, :-1].contiguous(), "labels": words[:, 1:].contiguous()}


def ddp(model: nn.Module) -> Step:
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=RATE, fused=True)

    def step(micros: list[dict[str, Tensor]]) -> float:
        total = 0.0
        for number, words in enumerate(micros):
            wrapped.require_backward_grad_sync = number == len(micros) - 1
            loss = wrapped(**words)["loss"] / len(micros)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def fsdp2(model: nn.Module) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(micros: list[dict[str, Tensor]]) -> float:
        total = 0.0
        for words in micros:
            loss = model(**words)["loss"] / len(micros)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def layout(name: str) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        manifest: dict[str, Any] = {
            "run": {"overlap_publish": True},
            "optimize": {"use": ["adamw"], "adamw": {"lr": RATE}},
        }
        if name != "replicated":
            manifest["partition"] = {"use": [name]}
        engines: dict[int, dsx.Engine] = {}

        def step(micros: list[dict[str, Tensor]]) -> float:
            if not engines:
                engines[0] = dsx.prepare(model, {**manifest, "batch": {"accumulation": len(micros)}})
            total = 0.0
            for words in micros:
                loss = engines[0](**words)["loss"]
                engines[0].backward(loss)
                engines[0].step()
                total += loss.item() / len(micros)
            return total

        return step

    return make


SYSTEMS: dict[str, Callable[[nn.Module], Step]] = {
    "ddp": ddp,
    "ddp again": ddp,
    "fsdp2": fsdp2,
    "replicated": layout("replicated"),
    "zero1": layout("zero1"),
    "zero2": layout("zero2"),
}


def work(rounds: int, accumulation: int, layers: int, width: int) -> None:
    """One rank: all systems, one step each a round, in turning order."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = gpt(layers=layers, width=width, heads=width // 64, context=256)
    steps = {name: make(copy.deepcopy(model)) for name, make in SYSTEMS.items()}
    wall: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    cpu: dict[str, list[float]] = {name: [] for name in SYSTEMS}
    names = list(SYSTEMS)
    for number in range(rounds + 3):
        micros = [batch(number, micro, 2, 128) for micro in range(accumulation)]
        losses = {}
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            started, busy = time.perf_counter(), time.process_time()
            losses[name] = steps[name](micros)
            dist.barrier()
            if number >= 3:
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(time.process_time() - busy)
        assert all(abs(loss - losses["ddp"]) < 1e-4 for loss in losses.values()), losses
    if dist.get_rank() == 0:
        size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        print(f"{size:.1f} M parameters, {dist.get_world_size()} ranks, accumulation {accumulation}, {rounds} rounds")
        for name in SYSTEMS:
            ratios = [mine / base for mine, base in zip(wall[name], wall["ddp"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            busy = statistics.median(cpu[name]) * 1e3
            print(
                f"{name:11} {middle:5.2f} ({low:.2f}-{high:.2f}) of ddp's time, {busy:6.0f} ms CPU a step", flush=True
            )


def main() -> None:
    from dsx.launch.launch import launch

    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    choices = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    keys = ("rounds", "accumulation", "layers", "width")
    launch("partition:work", {key: getattr(choices, key) for key in keys}, choices.nproc)


if __name__ == "__main__":
    main()
