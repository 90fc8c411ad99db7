"""One rank of one system: trains when it is told to.

    python -m partition_systems.rank HANDLE JSON

HANDLE is a connection to `partition.py`, on which each number asks for so many steps in a row and is answered by a
`Turn`, as a dictionary; 0 asks the allocator to give back what is free. The first answer comes unasked, after the first
step. JSON has what `main` needs.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist

from partition_systems.case import Case, Trainer, batches, model
from partition_systems.catalogue import System

LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1

Memory = tuple[int, int, int]


@dataclass(frozen=True)
class Turn:
    """What a rank says of some steps in a row.

    losses  of each step, this rank's
    ends    when each step ended, in seconds on the clock that processes share
    cpu     CPU seconds of the process until then, of all its threads
    rss     resident bytes at the end
    peak    the most there were since the turn began
    own     those of `rss` that are not pages of files, which a system short of memory takes away

    Memory is above what was there after imports.
    """

    losses: list[float]
    ends: list[float]
    cpu: list[float]
    rss: int
    peak: int
    own: int


class Rank:
    """Takes turns with a trainer; `base` is the memory of imports alone."""

    def __init__(self, trainer: Trainer, case: Case, base: Memory) -> None:
        self._trainer, self._case, self._base = trainer, case, base
        self._steps = 0

    def turn(self, steps: int) -> Turn:
        """Make steps in a row, and finish what the last one left under way."""
        rank, losses, ends, cpu = dist.get_rank(), [], [], []
        for micros in [batches(self._case, self._steps + more, rank) for more in range(steps)]:
            losses.append(self._trainer.step(micros))
            ends.append(time.perf_counter())
            cpu.append(time.process_time())
        self._steps += steps
        self._trainer.settle()
        dist.barrier()
        if not steps:
            LIBC.malloc_trim(0)
        memory = [now - base for now, base in zip(resident(), self._base, strict=True)]
        turn = Turn(losses, ends, cpu, *memory)
        forget_peak()
        return turn


def resident() -> Memory:
    """Bytes that are resident, that at most were, and those that are not pages of files: proc_pid_status(5)."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {words[0]: 1024 * int(words[1]) for words in lines if words[-1] == "kB"}
    return sizes["VmRSS:"], sizes["VmHWM:"], sizes["RssAnon:"] + sizes["RssShmem:"]


def forget_peak() -> None:
    """Let VmHWM start again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def main(handle: int, rank: int, store: str, system: System, case: Case) -> None:
    """Take turns until the other end closes.

    store  a file through which the ranks meet
    """
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a rank that is stopped would outlive the driver
    Path("/proc/self/oom_score_adj").write_text("1000")  # rather this than anybody else's process
    make = getattr(importlib.import_module(f"partition_systems.{system.module}"), system.function)
    for name in system.imports:
        importlib.import_module(name)
    forget_peak()
    base = resident()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=case.nproc)
    worker = Rank(make(model(case), case, **system.options), case, base)
    with Connection(handle) as connection:
        connection.send(asdict(worker.turn(1)))
        while True:
            try:
                steps = connection.recv()
            except EOFError:
                break
            connection.send(asdict(worker.turn(steps)))
    os._exit(0)


if __name__ == "__main__":
    words = json.loads(sys.argv[2])
    main(int(sys.argv[1]), words["rank"], words["store"], System(**words["system"]), Case(**words["case"]))
