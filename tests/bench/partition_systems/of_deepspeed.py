"""DeepSpeed, in an environment of its own; settings that are not named are its defaults."""

from __future__ import annotations

from functools import partial
from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]
import torch
from torch import nn

from partition_systems.case import RATE, SAMPLES, Case, Trainer, disk, engine_step


def stage(model: nn.Module, case: Case, *, number: int, offload: str | None = None) -> Trainer:
    """A ZeRO stage, with torch's fused AdamW, without the clipping that it does unless told otherwise.

    offload  "cpu" or "nvme": where the optimizer's states rest, updated by its own AdamW; files with pipelined and
             overlapped transfers of 1 MiB
    """
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": number},
        "bf16": {"enabled": case.dtype == "bf16"},
    }
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-not-found, unused-ignore]

        optimizer = DeepSpeedCPUAdam(model.parameters(), lr=RATE, adamw_mode=True, weight_decay=1e-2)
        where = {"device": offload, "nvme_path": disk(), "pipeline_read": True, "pipeline_write": True}
        config["zero_optimization"]["offload_optimizer"] = where
        config["aio"] = {"block_size": 1 << 20, "queue_depth": 16, "overlap_events": True, "single_submit": False}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return Trainer(partial(engine_step, engine))
