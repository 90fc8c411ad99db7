"""Every layout on models with hooks, functions and outputs of their own: as one plain PyTorch process, to 1e-9."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dsx
from parity import LAYOUTS, WIDTH, Call, Case, Net, sample


@attrs.frozen
class Slotted:
    hidden: Tensor
    note: str = "note"


class Named(NamedTuple):
    hidden: Tensor
    nothing: None


class Wraps(nn.Module):
    """Case 31: takes and returns its tensor in a container, with things that are no tensors."""

    def __init__(self, wrap: str) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(WIDTH, WIDTH), wrap

    def forward(self, held: Any) -> Any:
        hidden = self.linear(held["in"][0] if isinstance(held, dict) else held)
        if self.wrap == "dict":
            return {"hidden": hidden, "none": None, "count": 3, "deep": [{"name": "x"}]}
        return Slotted(hidden) if self.wrap == "attrs" else Named(hidden, None)


class Wrapped(Net):
    def __init__(self) -> None:
        super().__init__(Wraps("dict"), Wraps("attrs"), Wraps("named"))

    def forward(self, inputs: Tensor, classes: Tensor) -> Any:  # type: ignore[override]
        hidden = self.stem(inputs)
        hidden = hidden + self.blocks[0]({"in": (hidden, 7), "none": None})["hidden"]
        for block in self.blocks[1:]:
            hidden = hidden + block(hidden).hidden
        return {"loss": functional.cross_entropy(self.head(hidden), classes), "none": None, "hidden": Slotted(hidden)}


def of_mapping(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    yield call(*sample(step, micro, rank))["loss"]


class Router(nn.Module):
    """Keeps a loss of its own for the model to add, as mixtures of experts do; returns nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.linear(hidden)
        self.balance = self.gate(hidden).softmax(-1).mean(0).square().sum()
        return out


class Routed(Net):
    def __init__(self) -> None:
        super().__init__(*(Router() for _ in range(3)))

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        loss = super().forward(inputs, classes)
        return loss + sum(block.balance for block in self.blocks)


def hooked() -> nn.Module:
    """Users' own hooks, which change what goes forward and back, from before set-up."""
    model = Net()
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0] * 1.5,))
    model.blocks[1].register_forward_hook(lambda _, args, output: output * 0.5)
    model.blocks[1].register_full_backward_hook(lambda _, into, out: tuple(g * 2 for g in into))
    model.blocks[2].register_full_backward_pre_hook(lambda _, out: tuple(g * 3 for g in out))
    model.blocks[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model.head.bias.register_hook(lambda gradient: gradient * 0)
    return model


def hooking(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """The same, and hooks that come and go after set-up."""
    handles = [
        model.blocks[0].weight.register_hook(lambda gradient: gradient.sign() * 0.1),
        model.blocks[1].register_forward_hook(lambda _, args, output: output + args[0]),
    ]
    yield call(*sample(step, micro, rank))
    for handle in handles:
        handle.remove()


class Pair(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(hidden), self.second(hidden)


class FirstOnly(torch.autograd.Function):
    """Adds what it is given; the gradients of all but the first are None."""

    @staticmethod
    def forward(ctx: Any, *several: Tensor) -> Tensor:
        ctx.count = len(several)
        return torch.stack(several).sum(0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, *[None] * (ctx.count - 1)


class Partly(Net):
    """Case 32: blocks whose outputs have None for a gradient, some of them or all, and users' hooks that are told."""

    def __init__(self) -> None:
        super().__init__(Pair(), Pair(), Pair())
        for block in self.blocks:
            block.register_full_backward_hook(lambda _, into, out: tuple(g if g is None else g * 2 for g in into))

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.stem(inputs)
        hidden = FirstOnly.apply(*self.blocks[0](hidden))
        hidden = FirstOnly.apply(hidden, *self.blocks[1](hidden))
        hidden = hidden + self.blocks[2](hidden)[1]
        return functional.cross_entropy(self.head(hidden), classes)


def input_gradient(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """The loss is computed from inputs that need gradients, which stay the user's."""
    inputs, classes = sample(step, micro, rank)
    inputs.requires_grad_()
    yield call(inputs, classes)
    assert inputs.grad is not None


def adversarial(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """Gradients of the inputs alone say how to change them, before they are trained on."""
    inputs, classes = sample(step, micro, rank)
    (gradient,) = torch.autograd.grad(call(inputs.requires_grad_(), classes), inputs)
    yield call((inputs + 0.1 * gradient.sign()).detach(), classes)


def penalized(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """A penalty on gradients of the inputs, through which a second backward goes: weights stay gathered for it."""
    inputs, classes = sample(step, micro, rank)
    with call.gathered(model) if isinstance(call, dsx.Engine) else nullcontext():
        loss = call(inputs.requires_grad_(), classes)
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        loss = loss + gradient.square().sum()
    yield loss


def single() -> nn.Module:
    return Net().float()


def autocast(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """Two forwards with one cache of cast weights."""
    inputs, classes = sample(step, micro, rank)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(inputs.float(), classes) + call(2 * inputs.float(), classes, [2, 1])
    yield loss


def net() -> nn.Module:
    return Net()


CASES = {
    "containers": Case(Wrapped, of_mapping),
    "side losses": Case(Routed),
    "hooks": Case(hooked, hooking),
    "gradients of None": Case(Partly),
    "input gradients": Case(net, input_gradient),
    "adversarial inputs": Case(net, adversarial),
    "gradient penalty": Case(net, penalized),
    "autocast": Case(single, autocast, tolerance=1e-6),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_like_one_process(ranks, name: str, layout: str) -> None:
    CASES[name].check(ranks, layout)
