"""What every system is given: the same model, batches and learning rate."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dsx_text.model import gpt

RATE = 3e-4
SAMPLES, TOKENS = 2, 128
SIZES = {
    "3M": {"layers": 4, "width": 256},
    "25M": {"layers": 8, "width": 512},
    "100M": {"layers": 14, "width": 768},
}

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One measurement, the same for all systems; travels to the ranks as JSON.

    size          a key of SIZES: the model, in parameters
    dtype         "fp32" or "bf16"
    nproc         ranks
    accumulation  micro-batches of one step
    """

    size: str
    dtype: str
    nproc: int
    accumulation: int


@dataclass(frozen=True)
class Trainer:
    """A system at work.

    step    trains on the micro-batches of one step, returns this rank's mean loss
    settle  finishes what a step left under way
    """

    step: Callable[[Sequence[Batch]], float]
    settle: Callable[[], object] = lambda: None


def model(case: Case) -> nn.Module:
    """The GPT of the case, alike on every rank, in fp32."""
    torch.manual_seed(0)
    shape = SIZES[case.size]
    return gpt(layers=shape["layers"], width=shape["width"], heads=shape["width"] // 64, context=2 * TOKENS)


def disk() -> str:
    """The folder of files with states: DSX_BENCH_DISK, or one beside temporary files."""
    return os.environ.get("DSX_BENCH_DISK") or os.path.join(tempfile.gettempdir(), "dsx_bench_disk")


def batches(case: Case, step: int, rank: int) -> list[Batch]:
    """The micro-batches of a rank's step: int64 [SAMPLES, TOKENS] each, the same in every system."""
    generator = torch.Generator().manual_seed(1_000_000 * rank + step)
    words = torch.randint(0, 256, (case.accumulation, SAMPLES, TOKENS + 1), generator=generator)
    return [{"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()} for ids in words]


def engine_step(engine: Any, micros: Sequence[Batch]) -> float:
    """One step of an engine with forward, backward and step, as DeepSpeed's and dsx's; the mean loss."""
    total = 0.0
    for words in micros:
        loss = engine(**words)["loss"]
        engine.backward(loss)
        engine.step()
        total += loss.item()
    return total / len(micros)
