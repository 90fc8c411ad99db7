"""DeepSpeed, in an environment of its own; settings that are not named are its defaults."""

from __future__ import annotations

from functools import partial
from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]
import torch
from torch import nn

from partition_systems.case import RATE, SAMPLES, Case, Trainer, engine_step


def stage(model: nn.Module, case: Case, *, number: int) -> Trainer:
    """A ZeRO stage, with torch's fused AdamW, without the clipping that it does unless told otherwise."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": number},
        "bf16": {"enabled": case.dtype == "bf16"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return Trainer(partial(engine_step, engine))
