"""Forwards between updates: evaluation, generation, whole weights. Training goes on as if they had not been."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import dsx
from dsx.testing.models import tokens
from parity import LAYOUTS, STEPS, Call, Net, Outcome, Walk, check, plain, sample, straight, train
from zoo import KINDS

WORLD = 3


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@cache
def after(make: Callable[[], nn.Module], walk: Walk = straight, steps: int = STEPS, accumulation: int = 1) -> Outcome:
    """A plain run of so many updates."""
    return plain(make, walk, world=WORLD, steps=steps, accumulation=accumulation)


class Early(Net):
    """Its path depends on the data: it leaves early; in evaluation its blocks are called in another order."""

    def forward(self, inputs: Tensor, classes: Tensor, order: Sequence[int] | None = None) -> Tensor:
        hidden = self.stem(inputs)
        for block in self.blocks if self.training else self.blocks[::-1]:
            hidden = hidden + torch.tanh(block(hidden))
            if hidden[0].sum() > 0:
                break
        return functional.cross_entropy(self.head(hidden), classes)


def evaluate(call: Call, model: Any, step: int, rank: int) -> tuple[Tensor, list[int]]:
    """What a model says without gradients, in inference mode, and with a graph that nobody needs; the blocks it
    took."""
    taken: list[int] = []
    handles = [
        block.register_forward_hook(lambda *_, number=number: taken.append(number))
        for number, block in enumerate(model.blocks)
    ]
    model.eval()
    with torch.no_grad():
        found = [call(*sample(step + 50, 0, rank)).clone()]
    with torch.inference_mode():
        found.append(call(*sample(step + 50, 1, rank)).clone())
    found.append(call(*sample(step + 50, 2, rank)).detach())
    model.train()
    for handle in handles:
        handle.remove()
    return torch.stack(found), taken


def evaluated(layout: str, mode: str) -> tuple[Outcome, list[tuple[Tensor, list[int]]]]:
    """Evaluate after each update: the engine, the model itself, or the model while its weights are gathered."""
    results = []

    def between(engine: dsx.Engine, step: int) -> None:
        call = engine if mode == "engine" else engine.model
        with engine.gathered(engine.model) if mode == "gathered" else nullcontext():
            results.append(evaluate(call, engine.model, step, dist.get_rank()))

    return train(layout, Early, between=between), results


@pytest.mark.parametrize("mode", ["engine", "model", "gathered"])
def test_evaluation_between_updates_changes_nothing(ranks, layout: str, mode: str) -> None:
    """Case 66: a path that depends on the data and the rank, and another order of blocks than in training."""
    found = ranks.run(evaluated, layout, mode, world=WORLD)
    check([outcome for outcome, _ in found], after(Early))
    paths = set()
    for step in range(STEPS):
        twin = Early()
        twin.load_state_dict(after(Early, steps=step + 1).weights)
        for rank in range(WORLD):
            values, taken = found[rank][1][step]
            expected, path = evaluate(twin, twin, step, rank)
            assert taken == path
            assert (values - expected).abs().max() < 1e-9
            paths.add(tuple(taken))
    assert len(paths) > 1, "no path depends on the data"


def language(name: str) -> nn.Module:
    return KINDS[name].make().double()


LANGUAGE = {name: partial(language, name) for name in ("llama", "gpt2")}


def read(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    yield call(**KINDS["gpt2"].batch(step, micro, rank)).loss


def generate(model: Any, step: int, rank: int, length: int, inference: bool) -> list[int]:
    """Token ids that a model of `transformers` continues a prompt with."""
    model.eval()
    with torch.inference_mode() if inference else torch.no_grad():
        prompt = tokens(step, 7, rank, samples=1)[0]
        text: list[int] = model.generate(prompt, max_new_tokens=length, do_sample=False).flatten().tolist()
    model.train()
    return text


def generated(layout: str, name: str, mode: str) -> tuple[Outcome, list[list[int]]]:
    """Generate after each update; `uneven`: more on each rank than on the one before."""
    found = []

    def between(engine: dsx.Engine, step: int) -> None:
        rank = dist.get_rank()
        with engine.uneven() if mode == "uneven" else nullcontext():
            found.append(generate(engine.model, step, rank, _length(mode, rank), mode == "inference"))

    return train(layout, LANGUAGE[name], read, between=between), found


def _length(mode: str, rank: int) -> int:
    return 2 + 4 * rank if mode == "uneven" else 5


@pytest.mark.parametrize(("name", "mode"), [("gpt2", "no_grad"), ("llama", "inference"), ("gpt2", "uneven")])
def test_generation_between_updates_changes_nothing(ranks, layout: str, name: str, mode: str) -> None:
    """Cases 67, 68 and 69: `generate` of Hugging Face, of the same length on all ranks or not."""
    pytest.importorskip("transformers")
    found = ranks.run(generated, layout, name, mode, world=WORLD)
    check([outcome for outcome, _ in found], after(LANGUAGE[name], read))
    for step in range(STEPS):
        twin = language(name)
        twin.load_state_dict(after(LANGUAGE[name], read, step + 1).weights, strict=False)
        for rank in range(WORLD):
            expected = generate(twin, step, rank, _length(mode, rank), mode == "inference")
            assert found[rank][1][step] == expected


class Headless(Net):
    """Leaves its head, and a gain in a block, to whoever computes the loss."""

    def forward(self, inputs: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return hidden


def fused(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """A loss that reads weights of modules which are not called."""
    inputs, classes = sample(step, micro, rank)
    hidden = call(inputs)
    names = ["head.weight", "head.bias", "blocks.1.bias"]
    with call.gathered(names) if isinstance(call, dsx.Engine) else nullcontext():
        logits = hidden @ model.head.weight.T + model.head.bias
        loss = functional.cross_entropy(logits, classes) + model.blocks[1].bias.square().sum()
    yield loss


def headless(model: Any, call: Call, step: int, micro: int, rank: int) -> Iterator[Tensor]:
    """No forward of the whole model, only of parts of it."""
    inputs, classes = sample(step, micro, rank)
    with call.gathered(model) if isinstance(call, dsx.Engine) else nullcontext():
        hidden = torch.tanh(model.blocks[2](torch.tanh(model.stem(inputs))))
        loss = functional.cross_entropy(model.head(hidden), classes)
    yield loss


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("walk", [fused, headless], ids=["fused loss", "parts of the model"])
def test_weights_are_read_without_calling_their_module(ranks, layout: str, walk: Any, accumulation: int) -> None:
    """Case 72: through `engine.gathered`."""
    found = ranks.run(train, layout, Headless, walk, accumulation=accumulation, world=WORLD)
    check(found, after(Headless, walk, accumulation=accumulation))


@pytest.mark.parametrize("cheap", [True, False])
def test_buffers_of_whole_gradients_stay_only_where_new_memory_is_dear(cheap, monkeypatch) -> None:
    monkeypatch.setattr("dsx_zero.sharded_gradients.comes_back", lambda device: cheap)
    engine = dsx.prepare(Net(), {"partition": {"use": ["zero2"]}})
    sizes = []
    for step in range(2):
        engine.backward(engine(*sample(step)))
        during = engine.program.layout.bytes()["buffer"]
        engine.step()
        sizes.append((during > 0, engine.program.layout.bytes()["buffer"] > 0))
    engine.close()
    assert sizes == [(True, not cheap)] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_micro_batch_leaves_nothing_to_the_garbage_collector(layout: str) -> None:
    """What stays until it comes by lies between activations, and leaves holes in the heap."""
    partition = {} if layout == "replicated" else {"partition": {"use": [layout]}}
    engine = dsx.prepare(Net(), {**partition, "batch": {"accumulation": 2}})
    for micro in range(4):
        engine.backward(engine(*sample(0, micro)))
        engine.step()
    gc.collect()
    gc.disable()
    try:
        for micro in range(4):
            engine.backward(engine(*sample(1, micro)))
            engine.step()
        assert gc.collect() == 0
    finally:
        gc.enable()
        engine.close()
