"""Every layout against plain PyTorch: losses, and every parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dsx
from dsx.testing.models import Tangle, tokens
from dsx.testing.plain import distance, largest, train_plain, weights_of

STEPS = 5
LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
EACH_BACKWARD = ("zero2", "zero3")
"""Layouts that reduce gradients in every micro-batch: ranks make the same number of backwards."""


def manifest(layout: str, **sections: dict[str, object]) -> dict[str, object]:
    """`replicated` is what core does when no plugin is named."""
    partition = {} if layout == "replicated" else {"partition": {"use": [layout]}}
    return {**partition, **sections}


@pytest.fixture(params=LAYOUTS)
def layout(request) -> str:
    return request.param


def make(dtype: torch.dtype) -> nn.Module:
    """`never` and `empty` have no gradient in any step; plain PyTorch leaves them alone too."""
    return Tangle().to(dtype)


def train(
    rank: int,
    *,
    dtype: torch.dtype,
    layout: str = "replicated",
    accumulation: int = 1,
    clip_norm: float | None = None,
    steps: int = STEPS,
    side: str = "never",
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One rank's run: reported losses, and final weights."""
    sections: dict[str, dict[str, object]] = {"batch": {"accumulation": accumulation}}
    if clip_norm is not None:
        sections["optimize"] = {"clip_norm": clip_norm}
    model = make(dtype)
    engine = dsx.prepare(model, manifest(layout, **sections))
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            engine.backward(engine(*batch(step, micro, rank, side)))
            report = engine.step()
        assert report.stepped
        assert report.loss is not None
        losses.append(report.loss)
    weights = weights_of(engine)
    assert model.head.weight is model.embedding.weight
    engine.close()
    return losses, weights


def batch(step: int, micro: int, rank: int, side: str) -> tuple[object, ...]:
    """`side`: which ranks take the branch: never, first (rank 0 in even steps), turns (another rank each step)."""
    takes = (side == "first" and rank == 0 and step % 2 == 0) or (side == "turns" and rank == step % 2)
    return (*tokens(step, micro, rank), takes)


def on_rank(world: int, **choices: object) -> tuple[list[float], dict[str, torch.Tensor]]:
    rank = torch.distributed.get_rank()
    return train(rank, **choices)  # type: ignore[arg-type]


def expected(
    world: int, *, dtype: torch.dtype, accumulation: int = 1, clip_norm: float | None = None, side: str = "never"
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = make(dtype)
    losses = train_plain(
        model,
        lambda step, micro, rank: batch(step, micro, rank, side),
        steps=STEPS,
        world=world,
        accumulation=accumulation,
        clip_norm=clip_norm,
    )
    return losses, weights_of(model)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_one_rank_is_the_plain_loop_bit_for_bit(layout: str, accumulation: int) -> None:
    losses, weights = train(0, dtype=torch.float32, layout=layout, accumulation=accumulation)
    plain_losses, plain_weights = expected(1, dtype=torch.float32, accumulation=accumulation)
    if accumulation == 1:
        assert losses == plain_losses
    assert largest(losses, plain_losses) < 1e-6
    for name, tensor in plain_weights.items():
        if accumulation == 1:
            assert torch.equal(weights[name], tensor), name
    assert distance(weights, plain_weights) < 1e-6


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ranks_train_like_one_process(ranks, layout, world, accumulation, clip_norm, dtype) -> None:
    """Tied, frozen, unused, zero-size, 0-dim and (1, 17) parameters included; cases 20, 47, 55, 56."""
    choices = {"dtype": dtype, "accumulation": accumulation, "clip_norm": clip_norm}
    found = ranks.run(on_rank, world, world=world, layout=layout, **choices)
    losses, weights = expected(world, **choices)
    for rank_losses, rank_weights in found:
        assert rank_losses == found[0][0]
        assert all(torch.equal(tensor, found[0][1][name]) for name, tensor in rank_weights.items())
        assert largest(rank_losses, losses) < (1e-6 if dtype == torch.float32 else 1e-12)
        assert distance(rank_weights, weights) < (1e-5 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("side", ["first", "turns"])
@pytest.mark.parametrize("world", [2, 3])
def test_a_branch_that_one_rank_takes_is_zeros_elsewhere(ranks, layout, world, side, accumulation) -> None:
    """Case 29. The branch's parameters arrive late on one rank once all ranks have learnt not to wait for them."""
    choices = {"dtype": torch.float64, "accumulation": accumulation, "side": side, "clip_norm": 0.5}
    found = ranks.run(on_rank, world, world=world, layout=layout, **choices)
    losses, weights = expected(world, **choices)
    for rank_losses, rank_weights in found:
        assert largest(rank_losses, losses) < 1e-12
        assert distance(rank_weights, weights) < 1e-9


def test_parameters_unused_everywhere_are_left_alone(layout) -> None:
    """Case 35: no weight decay, no counter, as a plain optimizer that sees no gradient."""
    model = make(torch.float32)
    before = weights_of(model)
    engine = dsx.prepare(model, manifest(layout))
    for step in range(3):
        engine.backward(engine(*tokens(step, 0, 0)))
        engine.step()
    after = weights_of(engine)
    for name in ("never", "empty", "frozen.weight", "blocks.0.side.weight"):
        assert torch.equal(after[name], before[name]), name
    index = engine.program.parameters.index("never")
    assert engine.counts[index] == 0
    assert engine.counts[engine.program.parameters.index("rows")] == 3


def backwards_of(rank: int, backwards: int, layout: str) -> int:
    """Where gradients are reduced in every micro-batch, ranks make the same number of backwards."""
    return backwards + (rank == 0 and layout not in EACH_BACKWARD)


def late_backward(world: int, backwards: int, layout: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Several losses of one micro-batch; rank 0 makes one backward more than the others."""
    rank = torch.distributed.get_rank()
    model = make(torch.float64)
    engine = dsx.prepare(model, manifest(layout, optimize={"clip_norm": 0.5}))
    norms = []
    for step in range(4):
        for number in range(backwards_of(rank, backwards, layout)):
            engine.backward(engine(*tokens(step, number, rank)))
        report = engine.step()
        norms.append(report.norm)
    return norms, weights_of(engine)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("backwards", [1, 2])
def test_several_backwards_before_a_step_add_up(ranks, layout, world, backwards) -> None:
    found = ranks.run(late_backward, world, backwards, layout, world=world)
    model = make(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    norms = []
    for step in range(4):
        for rank in range(world):
            for number in range(backwards_of(rank, backwards, layout)):
                (model(*tokens(step, number, rank)) / world).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    for rank_norms, weights in found:
        assert largest(rank_norms, norms) < 1e-9
        assert distance(weights, weights_of(model)) < 1e-9


def weighted(world: int, close: bool, layout: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Micro-batches of different sizes, weighted by their tokens; with `close`, windows of two instead of three."""
    rank = torch.distributed.get_rank()
    model = make(torch.float64)
    engine = dsx.prepare(model, manifest(layout, batch={"accumulation": 3}, optimize={"clip_norm": 0.3}))
    losses = []
    for step in range(4):
        count = 2 if close else 3
        for micro in range(count):
            samples = 1 + (rank + micro) % 3
            engine.backward(engine(*tokens(step, micro, rank, samples)), weight=samples)
            report = engine.step(close=micro == count - 1)
        losses.append(report.loss)
    return losses, weights_of(engine)


@pytest.mark.parametrize("close", [False, True])
def test_weights_average_over_tokens(ranks, layout, close) -> None:
    """Case 53: unequal counts per micro-batch equal one big batch; a window closed early is rescaled."""
    world, count = 2, 2 if close else 3
    found = ranks.run(weighted, world, close, layout, world=world)
    model = make(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    losses = []
    for step in range(4):
        parts = [tokens(step, micro, rank, 1 + (rank + micro) % 3) for micro in range(count) for rank in range(world)]
        loss = model(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    for rank_losses, weights in found:
        assert largest(rank_losses, losses) < 1e-12
        assert distance(weights, weights_of(model)) < 1e-9


def overflow(
    world: int, poison: int, step: int, micro: int, layout: str
) -> tuple[list[object], dict[str, torch.Tensor]]:
    """A gradient of rank `poison` becomes infinite or NaN in one micro-batch."""
    rank = torch.distributed.get_rank()
    model = make(torch.float32)
    engine = dsx.prepare(model, manifest(layout, batch={"accumulation": 2}))
    reports = []
    for at in range(4):
        for number in range(2):
            loss = engine(*tokens(at, number, rank))
            if (rank, at, number) == (poison, step, micro):
                loss = loss * (float("inf") if micro else float("nan"))
            engine.backward(loss)
            report = engine.step()
        reports.append((report.stepped, report.skipped, report.skips, report.step))
    return reports, weights_of(engine)


@pytest.mark.parametrize(("world", "poison", "step", "micro"), [(1, 0, 0, 0), (2, 1, 1, 1), (3, 0, 3, 0), (4, 3, 0, 1)])
def test_a_gradient_that_is_not_finite_never_reaches_the_weights(ranks, layout, world, poison, step, micro) -> None:
    """Cases 58, 59, 63, 64: all ranks skip alike; weights, states and counters are as if the step had not been."""
    found = ranks.run(overflow, world, poison, step, micro, layout, world=world)
    model = make(torch.float32)
    kept = [at for at in range(4) if at != step]
    train_plain(model, lambda at, micro, rank: tokens(kept[at], micro, rank), steps=3, world=world, accumulation=2)
    for reports, weights in found:
        assert reports == found[0][0]
        assert [stepped for stepped, *_ in reports] == [at != step for at in range(4)]
        assert reports[step][1:3] == (True, 1)
        assert reports[-1][3] == 3
        assert distance(weights, weights_of(model)) < 1e-6


def two_engines(world: int, layout: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Ranks take the engines in different orders, where backward waits for nobody."""
    rank = torch.distributed.get_rank()
    models = [make(torch.float64), Tangle(seed=1).double()]
    engines = [dsx.prepare(model, manifest(layout)) for model in models]
    turn = -1 if rank == 0 and layout not in EACH_BACKWARD else 1
    for step in range(3):
        outputs = [engine(*tokens(step, 0, rank)) for engine in engines]
        for engine, output in list(zip(engines, outputs, strict=True))[::turn]:
            engine.backward(output)
        for engine in engines:
            engine.step()
    return weights_of(engines[0]), weights_of(engines[1])


def test_two_engines_of_one_process_do_not_mix_messages(ranks, layout) -> None:
    for found in ranks.run(two_engines, 2, layout, world=2):
        for seed, weights in enumerate(found):
            model = Tangle(seed=seed).double()
            train_plain(model, tokens, steps=3, world=2)
            assert distance(weights, weights_of(model)) < 1e-9


def different_models(world: int) -> None:
    rank = torch.distributed.get_rank()
    dsx.prepare(Tangle(width=17 + 2 * rank))


def different_manifests(world: int) -> None:
    rank = torch.distributed.get_rank()
    dsx.prepare(Tangle(), {"run": {"seed": rank}})


@pytest.mark.parametrize(("function", "what"), [(different_models, "model"), (different_manifests, "manifest")])
def test_ranks_that_disagree_say_so_before_the_first_step(ranks, function, what) -> None:
    for error in ranks.errors(function, 3, world=3):
        assert isinstance(error, dsx.DsxError)
        assert f"the ranks do not have the same {what}" in str(error)
        assert "rank 1, 2 differ from rank 0" in str(error)


def broadcast_first(world: int) -> dict[str, torch.Tensor]:
    rank = torch.distributed.get_rank()
    model = Tangle(seed=rank)
    model.offset.fill_(rank)
    engine = dsx.prepare(model)
    return {**weights_of(engine), "offset": model.offset.clone()}


def test_rank_0_s_weights_and_buffers_become_everyone_s(ranks) -> None:
    first, second = ranks.run(broadcast_first, 2, world=2)
    assert distance(second, first) == 0
    assert distance({n: t for n, t in first.items() if n != "offset"}, weights_of(Tangle(seed=0))) == 0


def without_data(world: int, layout: str) -> dict[str, torch.Tensor]:
    """The last rank has no data in the last micro-batch of every other window."""
    rank = torch.distributed.get_rank()
    model = make(torch.float64)
    engine = dsx.prepare(model, manifest(layout, batch={"accumulation": 2}))
    for step in range(4):
        for micro in range(2):
            if not (rank == world - 1 and micro == 1 and step % 2):
                engine.backward(engine(*tokens(step, micro, rank)))
            engine.step()
    return weights_of(engine)


@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_without_data_takes_part(ranks, layout, world) -> None:
    model = make(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for step in range(4):
        parts = [(m, r) for r in range(world) for m in range(2) if not (r == world - 1 and m == 1 and step % 2)]
        for micro, rank in parts:
            (model(*tokens(step, micro, rank)) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in ranks.run(without_data, world, layout, world=world):
        assert distance(weights, weights_of(model)) < 1e-9


def threads_after(engines: int, layout: str) -> int:
    """Threads of this process after so many engines were made, trained and dropped."""
    import gc
    from pathlib import Path

    rank = torch.distributed.get_rank()
    for seed in range(engines):
        engine = dsx.prepare(Tangle(seed=seed), manifest(layout))
        engine.train_step([tokens(0, 0, rank)])
        torch.distributed.barrier()
        engine.close()
        del engine
        gc.collect()
    return len(list(Path("/proc/self/task").iterdir()))


def test_an_engine_that_is_closed_takes_its_threads_with_it(ranks, layout) -> None:
    few, many = (ranks.run(threads_after, engines, layout, world=2) for engines in (2, 8))
    assert max(many) <= max(few) + 2, f"{few} threads after 2 engines, {many} after 8"
