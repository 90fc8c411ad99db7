"""1-bit Adam as its paper writes it (Tang et al. 2021, algorithm 1), in one process, parameter by parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor, nn

Batch = Callable[[int, int, int], tuple[object, ...]]


@frozen
class Numbers:
    """Hyperparameters, as the plugin's options; `owned`: as with zero1, where what the owner changes travels.

    `follow` is not in the paper: gradients after the freeze are divided by how much larger they have become.
    """

    freeze: int
    signs: str = "scaled"
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    block: int = 1024
    floor: float = 0.01
    clip_norm: float = float("inf")
    owned: bool = False
    follow: bool = False


def compress(value: Tensor, block: int) -> Tensor:
    """Signs times the mean absolute value of each block."""
    parts = []
    for part in value.split(block):
        size = part.abs().mean()
        parts.append(torch.where(part < 0, -size, size))
    return torch.cat(parts) if value.numel() else value


@frozen(eq=False)
class Parameter:
    """A parameter and what is kept for it: [n] each; `workers` one error for each rank."""

    weight: Tensor
    mean: Tensor
    variance: Tensor
    workers: Sequence[Tensor]
    owner: Tensor
    momenta: list[Tensor] = field(factory=list)
    steps: list[int] = field(factory=lambda: [0])
    sizes: list[float] = field(factory=list)

    @classmethod
    def of(cls, parameter: nn.Parameter, world: int) -> Parameter:
        weight = parameter.detach().view(-1)
        zeros = [torch.zeros_like(weight) for _ in range(world + 3)]
        return cls(weight, zeros[0], zeros[1], zeros[3:], zeros[2])

    def warm(self, grad: Tensor, n: Numbers) -> None:
        self.steps[0] += 1
        t, (one, two) = self.steps[0], n.betas
        self.mean.mul_(one).add_((1 - one) * grad)
        self.variance.mul_(two).add_((1 - two) * grad.square())
        mean, variance = self.mean / (1 - one**t), self.variance / (1 - two**t)
        self.weight.mul_(1 - n.lr * n.weight_decay).sub_(n.lr * mean / (variance.sqrt() + n.eps))

    def freeze(self, n: Numbers, typical: float) -> None:
        t = self.steps[0]
        if t:
            self.mean.div_(1 - n.betas[0] ** t)
            self.variance.div_(1 - n.betas[1] ** t)
        mean = float(self.variance.mean()) if self.variance.numel() else 0.0
        if mean or typical:
            self.variance.copy_(1 / (self.variance.clamp(min=n.floor * (mean or typical)).sqrt() + n.eps))
        if n.signs == "scaled":
            self.mean.mul_(self.variance)
        self.momenta.extend(self.mean.clone() for _ in self.workers)

    def compressed(self, grads: Sequence[Tensor], n: Numbers) -> None:
        ratio = self._ratio(n)
        self.sizes.append(sum(float(grad.square().mean()) for grad in grads) / len(grads) if grads[0].numel() else 0.0)
        (self._changed if n.owned else self._told)([grad * ratio for grad in grads], n)

    def _ratio(self, n: Numbers) -> float:
        """By the means of the squares of the first window after the freeze, and of all so far."""
        two, window = n.betas[1], round(1 / (1 - n.betas[1]))
        if not n.follow or len(self.sizes) < window:
            return 1.0
        first, now = (
            sum((1 - two) * two**age * size for age, size in enumerate(reversed(sizes))) / (1 - two ** len(sizes))
            for sizes in (self.sizes[:window], self.sizes)
        )
        return min(5.0, max(0.2, (first / now) ** 0.5)) if first and now else 1.0

    def _changed(self, grads: Sequence[Tensor], n: Numbers) -> None:
        """Each rank has a momentum of its own; the owner sends what it changes of the weights."""
        self.steps[0] += 1
        told = torch.zeros_like(self.mean)
        for grad, mean, error in zip(grads, self.momenta, self.workers, strict=True):
            mean.mul_(n.betas[0]).add_((1 - n.betas[0]) * grad * self.variance)
            value = mean + error
            sent = compress(value, n.block)
            error.copy_(value - sent)
            told += sent / len(grads)
        change = self.owner - n.lr * (told + n.weight_decay * self.weight)
        sent = compress(change, n.block)
        self.owner.copy_(change - sent)
        self.weight.add_(sent)

    def _told(self, grads: Sequence[Tensor], n: Numbers) -> None:
        """One momentum is common; its signs travel there and back."""
        self.steps[0] += 1
        told = torch.zeros_like(self.mean)
        for grad, error in zip(grads, self.workers, strict=True):
            factor = self.variance if n.signs == "scaled" else 1.0
            value = n.betas[0] * self.mean + (1 - n.betas[0]) * grad * factor + error
            sent = compress(value, n.block)
            error.copy_(value - sent)
            told += sent / len(grads)
        value = told + self.owner
        self.mean.copy_(compress(value, n.block))
        self.owner.copy_(value - self.mean)
        step = self.mean if n.signs == "scaled" else self.mean * self.variance
        self.weight.mul_(1 - n.lr * n.weight_decay).sub_(n.lr * step)


def train(
    model: nn.Module, batch: Batch, n: Any, *, world: int, steps: int, accumulation: int = 1, kind: Any = Parameter
) -> list[float]:
    """Losses; the model ends with the last weights.

    kind  what is kept for a parameter, and what an update does to it: `Parameter`, or as it
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {name: kind.of(parameter, world) for name, parameter in named.items()}
    elements = sum(parameter.numel() for parameter in named.values())
    losses, norm = [], 0.0
    for number in range(1, steps + 1):
        each: list[dict[str, Tensor]] = []
        total = 0.0
        for rank in range(world):
            model.zero_grad()
            for micro in range(accumulation):
                loss = model(*batch(number - 1, micro, rank)) / accumulation
                loss.backward()
                total += loss.item() / world
            each.append({name: p.grad.view(-1).clone() for name, p in named.items() if p.grad is not None})
        used = {name: [own.get(name, torch.zeros_like(kept[name].mean)) for own in each] for name in named}
        used = {name: grads for name, grads in used.items() if any(name in own for own in each)}
        frozen = number > n.freeze
        means = {name: sum(grads) / world for name, grads in used.items()}
        shown = [g for grads in used.values() for g in grads] if frozen else list(means.values())
        size = sum(float(g.square().sum()) for g in shown) / (world if frozen else 1)
        factor = min(1.0, n.clip_norm / (size**0.5 + 1e-6))
        for name, grads in used.items():
            if frozen:
                kept[name].compressed([grad * factor for grad in grads], n)
            else:
                kept[name].warm(means[name] * factor, n)
        if number == n.freeze:
            for state in kept.values():
                state.freeze(n, norm / elements)
        norm = sum(float(state.variance.sum()) for state in kept.values())
        losses.append(total)
    return losses
