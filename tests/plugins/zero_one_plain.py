"""0/1 Adam as its paper writes it (Lu et al. 2022, algorithm 1), in one process, parameter by parameter.

Both moments lose their bias, the decay is decoupled, and before the freeze signs of the gradient travel, as its authors
make it; each compressed number is one times the factor 1 / (root of the variance + eps), with a floor on the variance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import define, field, frozen
from torch import Tensor, nn

from plugins.onebit_plain import compress

Batch = Callable[[int, int, int], tuple[object, ...]]


@frozen
class Numbers:
    """Hyperparameters, as the plugin's options."""

    freeze: int
    variance_scale: int
    local_scale: int
    local_limit: int
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    block: int = 1024
    floor: float = 0.01
    clip_norm: float = float("inf")

    def looks(self, steps: int) -> set[int]:
        """T_v."""
        found, at, number = set(), 1, 0
        while at <= min(steps, self.freeze):
            found.add(at)
            at, number = at + 2 ** (number // self.variance_scale), number + 1
        return found

    def meetings(self, steps: int) -> set[int]:
        """T_u, after the freeze."""
        found, at = set(), self.freeze + 1
        while at <= steps:
            found.add(at)
            at += min(self.local_limit, 2 ** ((at - self.freeze - 1) // self.local_scale))
        return found


@define(eq=False)
class Parameter:
    """A parameter and what is kept for it: [n] each; `workers`, `means` and `moved` one for each rank."""

    weight: Tensor
    mean: Tensor
    variance: Tensor
    factor: Tensor
    owner: Tensor
    workers: Sequence[Tensor]
    means: list[Tensor] = field(factory=list)
    moved: list[Tensor] = field(factory=list)
    rates: float = 0.0
    steps: int = 0
    looks: int = 0

    @classmethod
    def of(cls, parameter: nn.Parameter, world: int) -> Parameter:
        weight = parameter.detach().view(-1)
        return cls(weight, *(torch.zeros_like(weight) for _ in range(4)), [torch.zeros_like(weight)] * world)

    def look(self, grad: Tensor, n: Numbers) -> None:
        self.looks += 1
        self.variance = n.betas[1] * self.variance + (1 - n.betas[1]) * grad.square()

    def unbiased(self, n: Numbers) -> Tensor:
        return self.variance / (1 - n.betas[1] ** self.looks) if self.looks else self.variance

    def refactor(self, n: Numbers, typical: float) -> None:
        if not self.weight.numel():
            return
        variance = self.unbiased(n)
        least = n.floor * (float(variance.mean()) or typical)
        self.factor = 1 / (variance.clamp(min=least).sqrt() + n.eps) if least else torch.zeros_like(variance)

    def step(self, n: Numbers) -> None:
        self.weight.sub_(n.lr * (self.mean * self.factor + n.weight_decay * self.weight))

    def exact(self, grad: Tensor, n: Numbers) -> None:
        self.steps += 1
        self.look(grad, n)
        self.mean = n.betas[0] * self.mean + (1 - n.betas[0]) * grad
        mean = self.mean / (1 - n.betas[0] ** self.steps)
        self.weight.mul_(1 - n.lr * n.weight_decay).sub_(n.lr * mean / (self.unbiased(n).sqrt() + n.eps))

    def averaged(self, values: Sequence[Tensor], n: Numbers) -> Tensor:
        """The 1-bit all-reduce, with error feedback on both sides."""
        told, errors = torch.zeros_like(self.mean), []
        for value, error in zip(values, self.workers, strict=True):
            sent = compress(value + error, n.block)
            errors.append(value + error - sent)
            told = told + sent / len(values)
        self.workers = errors
        sent = compress(told + self.owner, n.block)
        self.owner = told + self.owner - sent
        return sent

    def shared(self, grads: Sequence[Tensor], n: Numbers) -> None:
        grad = self.averaged([grad * self.factor for grad in grads], n)
        known = self.factor > 0
        self.mean = n.betas[0] * self.mean + (1 - n.betas[0]) * torch.where(known, grad / self.factor, 0)
        self.step(n)

    def local(self, grads: Sequence[Tensor], n: Numbers) -> None:
        self.rates += n.lr
        self.weight.mul_(1 - n.lr * n.weight_decay)
        for rank, grad in enumerate(grads):
            self.means[rank] = n.betas[0] * self.means[rank] + (1 - n.betas[0]) * grad
            self.moved[rank] = self.moved[rank] + n.lr * self.means[rank]

    def meet(self, n: Numbers) -> None:
        if not self.rates:
            return
        moved = self.averaged([moved * self.factor for moved in self.moved], n)
        self.weight.sub_(moved)
        mean = torch.where(self.factor > 0, moved / self.factor / self.rates, 0)
        self.means = [mean for _ in self.means]
        self.moved = [torch.zeros_like(moved) for _ in self.moved]
        self.rates = 0.0

    def at(self, rank: int, weight: Tensor) -> Tensor:
        """A rank's own weights."""
        return weight - self.moved[rank] * self.factor if self.moved else weight


def train(model: nn.Module, batch: Batch, n: Numbers, *, world: int, steps: int, accumulation: int = 1) -> list[float]:
    """Losses; the model ends with the weights that all ranks have in common."""
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    kept = {name: Parameter.of(parameter, world) for name, parameter in named.items()}
    elements = sum(parameter.numel() for parameter in named.values())
    looks, meetings, losses, typical, exact = n.looks(steps), n.meetings(steps), [], 0.0, True
    for number in range(1, steps + 1):
        each: list[dict[str, Tensor]] = []
        total = 0.0
        common = {name: state.weight.clone() for name, state in kept.items()}
        for rank in range(world):
            model.zero_grad()
            for name, state in kept.items():
                state.weight.copy_(state.at(rank, common[name]))
            for micro in range(accumulation):
                loss = model(*batch(number - 1, micro, rank)) / accumulation
                loss.backward()
                total += loss.item() / world
            each.append({name: p.grad.view(-1).clone() for name, p in named.items() if p.grad is not None})
        for name, state in kept.items():
            state.weight.copy_(common[name])
        used = {name: [own.get(name, torch.zeros_like(kept[name].mean)) for own in each] for name in named}
        used = {name: grads for name, grads in used.items() if any(name in own for own in each)}
        means = {name: sum(grads) / world for name, grads in used.items()}
        dense = number in looks
        shown = list(means.values()) if dense else [g for grads in used.values() for g in grads]
        size = sum(float(g.square().sum()) for g in shown) / (1 if dense else world)
        clip = min(1.0, n.clip_norm / (size**0.5 + 1e-6))
        exact = exact and dense
        before = typical
        for name, grads in used.items():
            state, scaled = kept[name], [grad * clip for grad in grads]
            if exact:
                state.exact(means[name] * clip, n)
            elif number > n.freeze:
                state.steps += 1
                state.local(scaled, n)
            elif dense:
                state.look(means[name] * clip, n)
        if dense:
            typical = sum(float(state.unbiased(n).sum()) for state in kept.values()) / elements
        for name, state in kept.items():
            if dense and not exact:
                old = state.factor
                state.refactor(n, before)
                # errors are kept in units of the factor
                ratio = torch.where(old > 0, state.factor / old, 0)
                state.workers, state.owner = [error * ratio for error in state.workers], state.owner * ratio
            if name in used and number <= n.freeze and not exact:
                scaled = [grad * clip for grad in used[name]]
                if dense:
                    state.mean = n.betas[0] * state.mean + (1 - n.betas[0]) * means[name] * clip
                    state.step(n)
                else:
                    state.shared(scaled, n)
        if exact and (number + 1 not in looks):
            for state in kept.values():
                state.mean = state.mean / (1 - n.betas[0] ** state.steps) if state.steps else state.mean
                state.refactor(n, before)
        if number == n.freeze:
            for state in kept.values():
                state.means = [state.mean for _ in range(world)]
                state.moved = [torch.zeros_like(state.mean) for _ in range(world)]
                state.workers, state.owner = [torch.zeros_like(state.mean)] * world, torch.zeros_like(state.mean)
        if number in meetings:
            for state in kept.values():
                state.meet(n)
        losses.append(total)
    return losses
