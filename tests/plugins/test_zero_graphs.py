"""Every layout on odd shapes, paths and orders of work: as one plain PyTorch process, to 1e-9."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from dsx.testing import distance, weights_of
from parity import LAYOUTS, WIDTH, Call, Case, Net, plain, prepare, sample
from zoo import KINDS


class Scale(nn.Module):
    """A block with one parameter of any shape, which may have no elements."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(shape))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * (self.scale.sum() + 1)


def odd_shapes() -> nn.Module:
    """Cases 20, 21 and 25: units of nothing, of an empty parameter alone, of one number, of fewer rows than ranks."""
    return Net(nn.Identity(), Scale(0), Scale(), Scale(1, 17), Scale(2, 128), Scale(3, 0, 2))


class Twice(Net):
    """Case 27: the same encoder is called twice, once on an input that needs no gradient, recomputed or not."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        if self.reentrant:
            inputs = inputs.requires_grad_()
        return functional.cross_entropy(self.head(self._encode(inputs) * self._encode(inputs.flip(1))), classes)

    def _encode(self, hidden: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        for block in self.blocks:
            if self.reentrant is None:
                hidden = torch.tanh(block(hidden))
            else:
                hidden = torch.tanh(checkpoint(block, hidden, use_reentrant=self.reentrant))
        return hidden


def recomputed() -> nn.Module:
    return Twice(reentrant=False)


def reentrant() -> nn.Module:
    return Twice(reentrant=True)


class Grouped(Net):
    """Several blocks are recomputed together, and one of them again by itself."""

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        from torch.utils.checkpoint import checkpoint

        hidden = self.stem(inputs)
        hidden = hidden + checkpoint(self._two, hidden, use_reentrant=False)
        return functional.cross_entropy(self.head(torch.tanh(self.blocks[2](hidden))), classes)

    def _two(self, hidden: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        hidden = torch.tanh(self.blocks[0](hidden))
        return torch.tanh(checkpoint(self.blocks[1], hidden, use_reentrant=False))


class Nested(nn.Module):
    """A block that calls others, or itself, in the middle of its own forward."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.inner = list(inner)  # not parts of this one

    def forward(self, hidden: Tensor, depth: int = 2) -> Tensor:
        hidden = torch.tanh(self.linear(hidden))
        for block in self.inner if depth else ():
            hidden = hidden + block(hidden, depth - 1)
        return self.linear(hidden)


def nested() -> nn.Module:
    first, second = Nested(), Nested()
    second.inner.append(first)
    return Net(first, second, Nested(second, first))


def recursive() -> nn.Module:
    first, second = Nested(), Nested()
    first.inner.append(first)
    second.inner.extend([first, second])
    return Net(first, second)


def skipping(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """Case 29: a whole block that rank 1 never takes, and one that in step 5 one rank takes for the first time."""
    late = [2] if step > 4 or (step == 4 and rank == 0) else []
    yield call(*sample(step, micro, rank), [0, *([] if rank == 1 else [1]), *late])


def orders(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """Each rank its own order, and some blocks several times."""
    yield call(*sample(step, micro, rank), [[0, 1, 2], [2, 1, 0, 1], [1, 1]][(step + rank) % 3])


def in_turns(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """Case 35: what no rank used in an update is left alone, and its count too; the last block is never used."""
    yield call(*sample(step, micro, rank), [step % 2])


def boundary(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """Case 47: blocks that one rank takes in the last micro-batch alone, or in the first alone."""
    extra = {(0, 1): [1], (2, 0): [2]}.get((micro, rank), [])
    yield call(*sample(step, micro, rank), [0, *extra])


def cut(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """Gradients end after the first block, on rank 0 alone."""
    handle = model.blocks[1].register_forward_pre_hook(lambda _, args: None if rank else (args[0].detach(),))
    yield call(*sample(step, micro, rank))
    handle.remove()


def repeated() -> nn.Module:
    """One block four times in the list, as ALBERT has it."""
    return Net(*[nn.Linear(WIDTH, WIDTH)] * 4)


class Embedded(Net):
    """Sparse gradients, in the root and in a block."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__(*(nn.Embedding(9, WIDTH, sparse=sparse) for _ in range(2)))

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = hidden + block(classes)
        return functional.cross_entropy(self.head(hidden), classes)


def dense() -> nn.Module:
    return Embedded(sparse=False)


def two_forwards(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """Two forwards, one backward."""
    yield call(*sample(step, micro, rank)) + 0.5 * call(*sample(step + 50, micro, rank), [2, 0])


def backwards_in_reverse(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """Two forwards, then two backwards, the last first."""
    first, second = call(*sample(step, micro, rank)), call(*sample(step + 50, micro, rank), [1])
    yield second
    yield first


def dropped(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """A forward of which no backward is made, and one without gradients that decides what is trained on."""
    call(*sample(step + 50, micro, rank))
    with torch.no_grad():
        teacher = call(*sample(step, micro, rank), [2, 1])
    yield call(*sample(step, micro, rank)) * teacher


def encoder() -> nn.Module:
    """Case 34: T5's encoder alone, whose embedding has two names."""
    return KINDS["t5 encoder"].make().double()


def encode(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    yield call(**KINDS["t5 encoder"].batch(step, micro, rank))["loss"]


def net() -> nn.Module:
    return Net()


CASES = {
    "odd shapes": Case(odd_shapes),
    "twice": Case(Twice),
    "twice recomputed": Case(recomputed, plain=Twice),
    "twice recomputed reentrant": Case(reentrant, plain=Twice),
    "groups recomputed": Case(Grouped),
    "recursive": Case(recursive),
    "nested": Case(nested),
    "blocks skipped": Case(net, skipping),
    "any order": Case(net, orders),
    "in turns": Case(net, in_turns),
    "boundary": Case(net, boundary, accumulation=3),
    "cut": Case(net, cut),
    "repeated": Case(repeated),
    "sparse": Case(Embedded, plain=dense),
    "two forwards": Case(net, two_forwards),
    "backwards in reverse": Case(net, backwards_in_reverse, accumulation=2),
    "dropped forwards": Case(net, dropped),
    "t5 encoder": Case(encoder, encode),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_it_trains_like_one_process(ranks, name: str, layout: str) -> None:
    CASES[name].check(ranks, layout)


def poisoned(layout: str) -> tuple[int, dict[str, Tensor]]:
    """In the second step the last rank's gradients are NaN."""
    engine, rank = prepare(odd_shapes(), layout), dist.get_rank()
    for step in range(5):
        loss = engine(*sample(step, 0, rank))
        engine.backward(loss * math.nan if (step, rank) == (1, dist.get_world_size() - 1) else loss)
        engine.step()
    return engine.skips, weights_of(engine)


def without_the_second(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    yield call(*sample(step + (step > 0), micro, rank))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_a_skipped_step_is_left(ranks, layout: str) -> None:
    """Cases 59 and 63: in units of different shapes, whose gradients may share memory."""
    expected = plain(odd_shapes, without_the_second, world=3, steps=4)
    for skips, weights in ranks.run(poisoned, layout, world=3):
        assert skips == 1
        assert distance(weights, expected.weights) < 1e-9


def in_windows(layout: str) -> list[dict[str, Tensor]]:
    """Two engines in turns; each one's step comes while the other's window is open."""
    rank = dist.get_rank()
    engines = [prepare(make(), layout, batch={"accumulation": 2}) for make in (net, Twice)]
    for micro in range(8):
        outputs = [engine(*sample(micro // 2, micro % 2, rank)) for engine in engines]
        for engine, output in zip(engines, outputs, strict=True):
            engine.backward(output)
        engines[micro % 2].step()
        engines[1 - micro % 2].step()
    return [weights_of(engine) for engine in engines]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_take_turns(ranks, layout: str) -> None:
    expected = [plain(make, world=2, steps=4, accumulation=2).weights for make in (net, Twice)]
    for found in ranks.run(in_windows, layout, world=2):
        assert max(map(distance, found, expected)) < 1e-9


def adversaries(layout: str | None, ranks: Sequence[int]) -> list[dict[str, Tensor]]:
    """A generator is trained through a critic, whose parameters need no gradient meanwhile; without a layout, plainly.

    ranks  whose data this process trains on
    """
    models = [Net(), Net()]
    engines = [prepare(model, layout) for model in models] if layout else []
    calls: Sequence[Call] = engines or models
    optimizers = [] if layout else [torch.optim.AdamW(model.parameters(), fused=True) for model in models]
    for step in range(8):
        trained = step % 2
        models[1].requires_grad_(trained == 1)
        for rank in ranks:
            inputs, classes = sample(step, 0, rank)
            loss = calls[1](inputs, classes) if trained else calls[1](inputs * calls[0](inputs, classes), classes)
            engines[trained].backward(loss) if layout else (loss / len(ranks)).backward()
        if layout:
            engines[trained].step()
        else:
            optimizers[trained].step()
            optimizers[trained].zero_grad()
    models[1].requires_grad_(True)
    return [weights_of(trainer) for trainer in engines or models]


def adversaries_on_rank(layout: str) -> list[dict[str, Tensor]]:
    return adversaries(layout, [dist.get_rank()])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_engine_is_trained_through_another(ranks, layout: str) -> None:
    expected = adversaries(None, range(2))
    for found in ranks.run(adversaries_on_rank, layout, world=2):
        assert max(map(distance, found, expected)) < 1e-9
