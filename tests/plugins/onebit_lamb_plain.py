"""1-bit LAMB as its paper writes it (Li et al. 2022, algorithm 1), in one process, parameter by parameter.

With a scale for each block the paper's coefficient that gives all parameters' momenta one size changes nothing: it is
left out. What is compressed is the momentum over the root of the frozen variance, which has a floor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor, nn

from plugins import onebit_plain
from plugins.onebit_plain import Batch, compress


@frozen
class Numbers:
    """Hyperparameters, as the plugin's options; `owned`: as with zero1, where what the owner changes travels."""

    freeze: int
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    max_coeff: float = 10.0
    min_coeff: float = 0.01
    coeff_beta: float = 0.9
    factor_max: float = 4.0
    factor_min: float = 0.5
    factor_threshold: float = 0.1
    block: int = 1024
    floor: float = 0.01
    clip_norm: float = float("inf")
    owned: bool = False


@define(eq=False)
class Parameter:
    """A parameter and what is kept for it: [n] each; `workers` and `momenta` one for each rank."""

    weight: Tensor
    mean: Tensor
    variance: Tensor
    fresh: Tensor
    owner: Tensor
    workers: Sequence[Tensor]
    momenta: Sequence[Tensor] = ()
    least: float = 0.0
    coefficient: float = 0.0
    ratio: float = 1.0
    steps: int = 0

    @classmethod
    def of(cls, parameter: nn.Parameter, world: int) -> Parameter:
        weight = parameter.detach().view(-1)
        return cls(weight, *(torch.zeros_like(weight) for _ in range(4)), [torch.zeros_like(weight)] * world)

    def warm(self, grad: Tensor, n: Numbers) -> None:
        self.steps += 1
        self.mean = n.betas[0] * self.mean + (1 - n.betas[0]) * grad
        self.variance = n.betas[1] * self.variance + (1 - n.betas[1]) * grad.square()
        mean = self.mean / (1 - n.betas[0] ** self.steps)
        variance = self.variance / (1 - n.betas[1] ** self.steps)
        step = mean / (variance.sqrt() + n.eps) + n.weight_decay * self.weight
        size, norms = 1.0, (float(self.weight.norm()), float(step.norm()))
        if min(norms) > 0:
            size = min(max(norms[0] / norms[1], n.min_coeff), n.max_coeff)
        self.coefficient = n.coeff_beta * self.coefficient + (1 - n.coeff_beta) * size
        self.weight.sub_(n.lr * size * step)

    def freeze(self, n: Numbers, typical: float) -> None:
        if self.steps:
            self.mean = self.mean / (1 - n.betas[0] ** self.steps)
            self.variance = self.variance / (1 - n.betas[1] ** self.steps)
            self.coefficient /= 1 - n.coeff_beta**self.steps
        else:
            self.coefficient = 1.0
        if self.weight.numel():
            self.least = n.floor * (float(self.variance.mean()) or typical)
            self.variance = self.variance.clamp(min=self.least)
        self.fresh = self.variance.clone()
        self.momenta = [self.mean] * len(self.workers)

    def compressed(self, grads: Sequence[Tensor], n: Numbers) -> None:
        self.steps += 1
        root, before = self.variance.sqrt() + n.eps, self.mean
        told, errors, momenta = torch.zeros_like(self.mean), [], []
        for grad, mean, error in zip(grads, self.momenta, self.workers, strict=True):
            momenta.append(n.betas[0] * (mean if n.owned else before) + (1 - n.betas[0]) * grad)
            value = momenta[-1] / root + error
            sent = compress(value, n.block)
            errors.append(value - sent)
            told = told + sent / len(grads)
        self.workers, self.momenta = errors, momenta
        if not n.owned:
            sent = compress(told + self.owner, n.block)
            self.owner, told = told + self.owner - sent, sent
        self.mean = told * root
        grad = (self.mean - n.betas[0] * before) / (1 - n.betas[0])
        self.fresh = n.betas[1] * self.fresh + (1 - n.betas[1]) * grad.square()
        step = told + n.weight_decay * self.weight
        if not self.weight.numel():
            return
        ratio = float((root / (self.fresh.clamp(min=self.least).sqrt() + n.eps)).max())
        if float(step.norm()) > 0:
            share = min(1.0, float(told.norm() / step.norm()))
            ratio = ratio * share + 1 - share
        ratio = min(max(ratio, n.factor_min), n.factor_max)
        low, high = self.ratio * (1 - n.factor_threshold), self.ratio * (1 + n.factor_threshold)
        self.ratio = min(max(ratio, low), high)
        change = -n.lr * self.coefficient * self.ratio * step
        if n.owned:
            sent = compress(change + self.owner, n.block)
            self.owner, change = change + self.owner - sent, sent
        self.weight.add_(change)


def train(model: nn.Module, batch: Batch, n: Numbers, **more: Any) -> list[float]:
    """As 1-bit Adam's, with LAMB's updates."""
    return onebit_plain.train(model, batch, n, kind=Parameter, **more)
