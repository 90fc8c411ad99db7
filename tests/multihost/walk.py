"""What the ranks of the check run: one collective and one small state file a step, from which it goes on.

Arguments: the folder of the state, then, optionally, the rank that fails and the step at which it does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from dsx.launch.distributed import join
from dsx.launch.stop import stop_requested

STEP_S = 0.1
STEPS = 100_000


def main(folder: Path, failing: int | None, at: int | None) -> None:
    ranks = join(torch.device("cpu"))
    (folder / f"pid_{os.getpid()}").write_text(str(ranks.rank))
    state = folder / "state.json"
    step, value = json.loads(state.read_text()) if state.exists() else (0, 1.0)
    while step < STEPS:
        stop = torch.tensor([stop_requested(), 1])
        dist.all_reduce(stop, dist.ReduceOp.MAX)
        if stop[0]:
            return
        step, value = step + 1, (value * 1.000_1 + step) % 1000
        if ranks.rank == 0:
            with (folder / "log").open("a") as log:
                log.write(json.dumps([time.time(), step, value, ranks.world]) + "\n")
            save(state, step, value)
        if (ranks.rank, step) == (failing, at):
            raise ZeroDivisionError("the failure that the check asked for")
        time.sleep(STEP_S)


def save(state: Path, step: int, value: float) -> None:
    partial = state.with_suffix(".partial")
    partial.write_text(json.dumps([step, value]))
    partial.replace(state)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:] or (-1, -1)))
