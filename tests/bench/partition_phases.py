"""Where a step's time goes: forward, backward and update of the model alone, of DDP and of every layout.

    python tests/bench/partition_phases.py [--systems DDP,zero3] [--size 25M] [--dtype bf16] [--nproc 2] [--rounds 20]

All systems are in the same processes and take turns; ranks meet before each phase, so that none pays for another's
delay. "alone" is plain PyTorch on each rank, without exchange and without an update: what no layout can save.
Printed: medians of CPU and wall milliseconds of rank 0. Publishing is part of the update here, not of the next forward.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from partition_systems.case import RATE, SIZES, Batch, Case, batches, model
from partition_systems.of_torch import autocast
from torch import Tensor

import dsx

PHASES = ("forward", "backward", "update")
SYSTEMS = ("alone", "DDP", "replicated", "zero1", "zero2", "zero3")
WARM = 3

System = tuple[Callable[[Batch], Tensor], Callable[[Tensor], object], Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=_names, default=SYSTEMS, help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--size", choices=SIZES, default="25M")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    choices = parser.parse_args()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(found.getsockname()[1]))
    case = Case(choices.size, choices.dtype, choices.nproc, 1)
    multiprocessing.spawn(_rank, (case, choices.systems, choices.rounds), choices.nproc)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in SYSTEMS]:
        raise argparse.ArgumentTypeError(f"no system is called {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    return names


def _rank(rank: int, case: Case, names: Sequence[str], rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=case.nproc)
    systems = {name: _system(name, case) for name in names}
    taken: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in systems}
    for number in range(rounds + WARM):
        for name in list(systems)[:: 1 if number % 2 else -1]:
            taken[name].append(_step(systems[name], batches(case, number, rank)[0]))
    if rank == 0:
        _print({name: steps[WARM:] for name, steps in taken.items()})


def _system(name: str, case: Case) -> System:
    if name == "alone":
        return _plain(model(case), case, lambda: None)
    if name != "DDP":
        return _layout(case, [] if name == "replicated" else [name])
    wrapped = torch.nn.parallel.DistributedDataParallel(model(case))
    return _plain(wrapped, case, torch.optim.AdamW(wrapped.parameters(), lr=RATE, fused=True).step)


def _plain(module: torch.nn.Module, case: Case, update: Callable[[], object]) -> System:
    def forward(words: Batch) -> Tensor:
        with autocast(case)():
            loss: Tensor = module(**words)["loss"]
        return loss

    def finish() -> None:
        update()
        module.zero_grad()

    return forward, Tensor.backward, finish


def _layout(case: Case, use: list[str]) -> System:
    manifest: dict[str, Any] = {
        "optimize": {"use": ["adamw"], "adamw": {"lr": RATE}},
        "partition": {"use": use},
        "precision": {"use": ["bf16"] if case.dtype == "bf16" else []},
    }
    engine = dsx.prepare(model(case), manifest)
    return lambda words: engine(**words)["loss"], engine.backward, engine.step


def _step(system: System, words: Batch) -> list[tuple[float, float]]:
    """(CPU, wall) seconds of each phase."""
    forward, backward, update = system
    made: list[Any] = []
    work = (lambda: made.append(forward(words)), lambda: backward(made[0]), update)
    return [_timed(phase) for phase in work]


def _timed(phase: Callable[[], object]) -> tuple[float, float]:
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    phase()
    return time.process_time() - cpu, time.perf_counter() - wall


def _print(taken: dict[str, list[list[tuple[float, float]]]]) -> None:
    print("| system | " + " | ".join(f"{phase} CPU ms (wall)" for phase in PHASES) + " | all |")
    print("| --- " * (len(PHASES) + 2) + "|")
    for name, steps in taken.items():
        times = [
            [statistics.median(step[at][clock] for step in steps) for clock in (0, 1)] for at in range(len(PHASES))
        ]
        times.append([sum(each) for each in zip(*times, strict=True)])
        cells = [f"{cpu * 1e3:.0f} ({wall * 1e3:.0f})" for cpu, wall in times]
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
