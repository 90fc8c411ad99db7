"""The mean loss over held-out samples, each counted once whatever the world size."""

from __future__ import annotations

import time
from typing import Any

import torch

from dsx.batch import forward
from dsx.contracts import Evaluation
from dsx.engine import Engine
from dsx.run.data import collate


def evaluate(
    engine: Engine, source: Any, *, micro: int, device: torch.device, samples: int | None = None
) -> Evaluation:
    """Evaluate on the first `samples` (None: all) of `source`, dealt to the ranks in turn.

    Every rank makes the same number of forwards, so that layouts which gather parameters stay in step; a rank that has
    run out repeats a sample at weight 0.
    """
    started = time.perf_counter()
    transport, model = engine.program.transport, engine.model
    count = len(source) if samples is None else min(samples, len(source))
    stride = micro * transport.world
    total = torch.zeros(2, dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    with torch.no_grad(), engine.settled():
        for first in range(0, count, stride):
            begin = first + transport.rank * micro
            indices = [index for index in range(begin, begin + micro) if index < count]
            batch = collate([source[index] for index in indices or [0]], device)
            loss = _loss(forward(engine, batch))
            total += torch.stack(
                [loss.double() * len(indices), torch.tensor(float(len(indices)), device=device).double()]
            )
    model.train(training)
    transport.all_reduce(total, "sum", channel="admin", purpose="admin").wait()
    return Evaluation(engine.steps, (total[0] / total[1]).item(), count, time.perf_counter() - started)


def _loss(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output.reshape(())
    loss = output["loss"] if hasattr(output, "keys") else output.loss
    return loss.reshape(())  # type: ignore[no-any-return]
