"""Plain PyTorch, as the measure of everything: a loop without dsx, and comparisons against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsx.engine import Engine

Batch = tuple[Any, ...]
Data = Callable[[int, int, int], Batch]
"""(update from 0, micro-batch, rank) -> the model's arguments."""


def train_plain(
    model: nn.Module,
    data: Data,
    *,
    steps: int,
    world: int = 1,
    accumulation: int = 1,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    clip_norm: float | None = None,
    rate: Callable[[int], float] = lambda step: 1.0,
) -> list[float]:
    """Train one model in one process on the data of `world` ranks; the mean loss of each update.

    optimizer  None: torch's fused AdamW with its defaults
    rate       factor on the learning rate of update number `step`, from 1
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    stepper = optimizer(trained) if optimizer else torch.optim.AdamW(trained, fused=True)
    base = [group["lr"] for group in stepper.param_groups]
    losses = []
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world):
                loss = model(*data(step, micro, rank))
                (loss / (accumulation * world)).backward()
                total += loss.item() / (accumulation * world)
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip_norm)
        for group, lr in zip(stepper.param_groups, base, strict=True):
            group["lr"] = lr * rate(step + 1)
        stepper.step()
        stepper.zero_grad()
        losses.append(total)
    return losses


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest |a - b| / max(|b|, 1) over tensors of the same name, norms over whole tensors."""
    if found.keys() != expected.keys():
        raise AssertionError(f"different tensors: {sorted(found.keys() ^ expected.keys())}")
    worst = 0.0
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise AssertionError(f"'{name}' has the shape {list(found[name].shape)}, not {list(tensor.shape)}")
        difference = (found[name].double() - tensor.double()).norm().item()
        worst = max(worst, difference / max(tensor.double().norm().item(), 1.0))
    return worst


def weights_of(model: nn.Module | Engine) -> dict[str, Tensor]:
    """Copies of a model's parameters, or of the whole weights that an engine trains, by first name."""
    named = model.named_parameters() if isinstance(model, nn.Module) else model.weights()
    return {name: parameter.detach().clone() for name, parameter in named}


def largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference of two series."""
    return max((abs(a - b) for a, b in zip(found, expected, strict=True)), default=0.0)
