"""One walk over a model, made by ranks under dsx and by one plain PyTorch process: both must end alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.nn import functional

import dsx
from dsx.testing import Ranks, distance, largest, weights_of

LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
"""`replicated` is what core does when no plugin is named."""

STEPS = 4
WIDTH, CLASSES = 6, 5

Call = Callable[..., Any]
Walk = Callable[[Any, Call, int, int, int], Iterator[Tensor]]
"""(model, call, step, micro-batch, rank) -> the losses of a micro-batch; a backward is made of each before the next is
asked for. `call` is the engine, or the model itself."""


@frozen
class Outcome:
    """What a run came to: loss and gradient norm of each update, and the last weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def prepare(model: nn.Module, layout: str, **sections: Any) -> dsx.Engine:
    partition = {} if layout == "replicated" else {"partition": {"use": [layout]}}
    return dsx.prepare(model, {**partition, **sections})


def sample(step: int, micro: int = 0, rank: int = 0) -> tuple[Tensor, Tensor]:
    """The same for the same (step, micro-batch, rank): float64 [3, WIDTH], and classes."""
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
    inputs = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, CLASSES, (3,), generator=generator)


def straight(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    yield call(*sample(step, micro, rank))


class Net(nn.Module):
    """A stem, residual blocks and a head, in float64; the same values whenever it is made."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList(blocks or [nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.double()
        generator = torch.Generator().manual_seed(1)
        for parameter in filter(torch.is_floating_point, self.parameters()):
            nn.init.normal_(parameter, std=0.4, generator=generator)

    def forward(self, inputs: Tensor, classes: Tensor, order: Sequence[int] | None = None) -> Tensor:
        """The loss; `order` is that in which blocks are called, none, some or all of them."""
        hidden = self.stem(inputs)
        for number in range(len(self.blocks)) if order is None else order:
            hidden = hidden + torch.tanh(self.blocks[number](hidden))
        return functional.cross_entropy(self.head(hidden), classes)


def train(
    layout: str,
    make: Callable[[], nn.Module],
    walk: Walk = straight,
    *,
    steps: int = STEPS,
    accumulation: int = 1,
    between: Callable[[dsx.Engine, int], None] | None = None,
) -> Outcome:
    """One rank's run; `between` is called after each update."""
    model = make()
    engine = prepare(model, layout, batch={"accumulation": accumulation})
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accumulation):
            for loss in walk(model, engine, step, micro, dist.get_rank()):
                engine.backward(loss)
            report = engine.step()
        assert report.loss is not None
        assert report.norm is not None
        losses.append(report.loss)
        norms.append(report.norm)
        if between is not None:
            between(engine, step)
    outcome = Outcome(losses, norms, weights_of(engine))
    engine.close()
    return outcome


def plain(
    make: Callable[[], nn.Module],
    walk: Walk = straight,
    *,
    world: int,
    steps: int = STEPS,
    accumulation: int = 1,
) -> Outcome:
    """The same in one process without dsx: the ranks' micro-batches one after the other."""
    model = make()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    losses, norms = [], []
    for step in range(steps):
        total = 0.0
        for micro in range(accumulation):
            for rank in range(world):
                for loss in walk(model, model, step, micro, rank):
                    (loss / accumulation).backward()  # as a rank's own hooks see it
                    total += loss.item() / (accumulation * world)
        gradients = [parameter.grad.div_(world) for parameter in trained if parameter.grad is not None]
        losses.append(total)
        norms.append(sum(gradient.double().square().sum().item() for gradient in gradients) ** 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, norms, weights_of(model))


def check(found: Sequence[Outcome], expected: Outcome, tolerance: float = 1e-9) -> None:
    """All ranks alike, bit for bit, and near the plain run; case 55: the norm is everybody's."""
    first = found[0]
    for outcome in found:
        assert (outcome.losses, outcome.norms) == (first.losses, first.norms), "the ranks report different things"
        same = all(torch.equal(tensor, first.weights[name]) for name, tensor in outcome.weights.items())
        assert same, "the ranks end in different weights"
    off = {
        "losses": largest(first.losses, expected.losses),
        "norms": largest(first.norms, expected.norms),
        "weights": distance(first.weights, expected.weights),
    }
    for what, by in off.items():
        assert by < tolerance, f"the {what} are off by {by:.1e}, not below {tolerance:g}"
    assert _dtypes(first) == _dtypes(expected)


def _dtypes(outcome: Outcome) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in outcome.weights.items()}


@frozen
class Case:
    """A model and a walk over it.

    plain      another model of the same values for the plain run, of what the first one does in another way
    tolerance  of losses, norms and weights
    """

    make: Callable[[], nn.Module]
    walk: Walk = straight
    accumulation: int = 1
    plain: Callable[[], nn.Module] | None = None
    tolerance: float = 1e-9

    def check(self, ranks: Ranks, layout: str, world: int = 3, steps: int = 6) -> None:
        choices: dict[str, Any] = {"steps": steps, "accumulation": self.accumulation}
        found = ranks.run(train, layout, self.make, self.walk, world=world, **choices)
        check(found, plain(self.plain or self.make, self.walk, world=world, **choices), self.tolerance)
