"""torch's own: DDP, ZeroRedundancyOptimizer, FSDP2; settings that are not named are the defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from partition_systems.case import RATE, Batch, Case, Trainer


def ddp(model: nn.Module, case: Case, *, views: bool = False) -> Trainer:
    """DistributedDataParallel with fused AdamW; bf16 by autocast, with parameters in fp32.

    views  gradients are views of the buckets, which saves a copy of them all
    """
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=RATE, fused=True)
    return Trainer(partial(_step, wrapped, optimizer, wrapped.no_sync, autocast(case)))


def zero_redundancy(model: nn.Module, case: Case) -> Trainer:
    """DistributedDataParallel with its optimizer's states spread over ranks."""
    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=RATE, fused=True)
    return Trainer(partial(_step, wrapped, optimizer, wrapped.no_sync, autocast(case)))


def fsdp2(model: nn.Module, case: Case, *, reshard: bool) -> Trainer:
    """FSDP2, a unit a block; bf16 by its policy, with shards and reductions in fp32.

    reshard  give whole parameters back after forward and gather them again in backward
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = half if case.dtype == "bf16" else MixedPrecisionPolicy()
    for unit in (*model.get_submodule("blocks").children(), model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    return Trainer(partial(_step, model, optimizer, nullcontext, nullcontext))


def autocast(case: Case) -> Callable[[], AbstractContextManager[object]]:
    """Makes contexts of the precision of DDP's forward: bf16 by autocast, or as it is."""
    return partial(torch.autocast, "cpu", torch.bfloat16, enabled=case.dtype == "bf16")


def _step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    unsynchronized: Callable[[], AbstractContextManager[object]],
    precision: Callable[[], AbstractContextManager[object]],
    micros: Sequence[Batch],
) -> float:
    """The loop that their documentation shows; all but the last micro-batch may stay on this rank."""
    return sum(_losses(model, optimizer, unsynchronized, precision, micros)) / len(micros)


def _losses(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    unsynchronized: Callable[[], AbstractContextManager[object]],
    precision: Callable[[], AbstractContextManager[object]],
    micros: Sequence[Batch],
) -> Iterable[float]:
    for number, words in enumerate(micros, 1):
        with unsynchronized() if number < len(micros) else nullcontext():
            with precision():
                loss = model(**words)["loss"]
            (loss / len(micros)).backward()
        yield loss.item()
    optimizer.step()
    optimizer.zero_grad()
