"""What users change in a model after set-up, and backwards that the engine does not make: named, under every layout."""

from __future__ import annotations

import gc
import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from dsx.contracts import Dtypes
from dsx.errors import DsxError
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing.models import Tangle, tokens
from dsx.testing.plain import distance, weights_of
from dsx.watch import SLICE, Watch

WHOLE = ("replicated", "zero1", "zero2")
"""Layouts that keep parameters whole: there the parameter is the weight."""

LAYOUTS = (*WHOLE, "zero3")


def prepare(model: nn.Module, layout: str = "replicated", **sections: Any) -> dsx.Engine:
    partition = {} if layout == "replicated" else {"partition": {"use": [layout]}}
    return dsx.prepare(model, {**partition, **sections})


def bf16(model: nn.Module, layout: str = "replicated") -> dsx.Engine:
    return prepare(model, layout, precision={"use": ["bf16"]})


def train(engine: dsx.Engine, step: int = 0) -> dsx.contracts.Report:
    return engine.train_step([tokens(step, 0, 0)])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_backward_of_the_user_s_own_is_refused(layout: str) -> None:
    model = Tangle()
    engine = prepare(model, layout)
    loss = engine(*tokens(0, 0, 0))
    with pytest.raises(DsxError, match="gradients came from a backward that the engine did not make") as caught:
        loss.backward()
    assert str(caught.value).splitlines()[1].startswith("  where: the parameter '")
    assert str(caught.value).splitlines()[2:] == [
        "  found: loss.backward(), or torch.autograd.backward",
        "  remedy: call engine.backward(loss): it scales the loss and brings the ranks' gradients together",
    ]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_training_goes_on_after_a_backward_of_the_user_s_own() -> None:
    found = []
    for mistake in (True, False):
        engine = prepare(Tangle())
        if mistake:
            with pytest.raises(DsxError):
                engine(*tokens(0, 0, 0)).backward()
        train(engine)
        found.append(weights_of(engine))
    assert distance(*found) == 0


def test_autograd_grad_is_free() -> None:
    model = Tangle()
    engine = prepare(model)
    (slope,) = torch.autograd.grad(engine(*tokens(0, 0, 0)), [model.rows])
    assert slope.norm() > 0
    assert train(engine).stepped


class Boom(Exception):
    pass


def test_what_a_hook_raises_comes_out_as_it_is() -> None:
    model = Tangle()
    engine = prepare(model)

    def boom(gradient: Tensor) -> None:
        raise Boom("here")

    handle = model.rows.register_hook(boom)
    with pytest.raises(Boom, match="here"):
        train(engine)
    handle.remove()


def attach_parameter(model: Tangle) -> None:
    model.blocks[1].extra = nn.Parameter(torch.ones(2))


def attach_module(model: Tangle) -> None:
    model.blocks[1].extra = nn.Linear(2, 2)


def attach_inside(model: Tangle) -> None:
    model.blocks[1].extra = nn.Sequential(nn.Dropout())
    model.blocks[1].extra.append(nn.Linear(2, 2))


def append_to_a_list(model: Tangle) -> None:
    model.blocks.append(nn.Linear(2, 2))


def replace_parameter(model: Tangle) -> None:
    model.blocks[0].gain = nn.Parameter(torch.ones(()))


def replace_module(model: Tangle) -> None:
    model.blocks[0].norm = nn.LayerNorm(17)


def untie(model: Tangle) -> None:
    model.head.weight = nn.Parameter(torch.ones(23, 17))


def tie(model: Tangle) -> None:
    model.blocks[0].up.bias = model.blocks[1].up.bias


def load_by_assignment(model: Tangle) -> None:
    model.load_state_dict(Tangle().state_dict(), assign=True)


def parametrize(model: Tangle) -> None:
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].up)


@pytest.mark.parametrize("layout", ["replicated", "zero2"])
@pytest.mark.parametrize(
    ("change", "name", "what"),
    [
        (attach_parameter, "blocks.1.extra", "attached to"),
        (attach_module, "blocks.1.extra.weight", "attached to"),
        (attach_inside, "blocks.1.extra.1.weight", "attached to"),
        (append_to_a_list, "blocks.3.weight", "attached to"),
        (replace_parameter, "blocks.0.gain", "replaced in"),
        (replace_module, "blocks.0.norm.weight", "replaced in"),
        (untie, "head.weight", "replaced in"),
        (tie, "blocks.0.up.bias", "replaced in"),
        (load_by_assignment, "rows", "replaced in"),
        (parametrize, "blocks.0.up.parametrizations.weight.original0", "attached to"),
    ],
)
def test_parameters_that_nobody_would_train_are_refused(
    layout: str, change: Callable[[Tangle], None], name: str, what: str
) -> None:
    model = Tangle()
    engine = prepare(model, layout)
    train(engine)
    loss = engine(*tokens(0, 0, 0))
    change(model)
    words = f"the parameter '{name}' was {what} the model after set-up"
    with pytest.raises(DsxError) as caught:
        engine(*tokens(0, 0, 0))
    assert str(caught.value).splitlines()[0] == words
    engine.backward(loss)
    with pytest.raises(DsxError, match=words):
        engine.step()


def test_what_is_attached_and_taken_away_again_is_no_change() -> None:
    model = Tangle()
    engine = prepare(model)
    gain = model.blocks[0].gain
    model.blocks[0].gain = nn.Parameter(torch.zeros(()))
    model.blocks[0].gain = gain
    model.blocks[1].extra = nn.Linear(2, 2)
    del model.blocks[1].extra
    model.drop = nn.Dropout()  # it has no parameters
    assert train(engine).stepped
    assert not engine.program.watch.attached


def test_other_models_and_closed_engines_are_left_alone() -> None:
    model, other = Tangle(), Tangle()
    engine = prepare(model)
    train(engine)
    attach_parameter(other)
    assert not engine.program.watch.attached
    engine.close()
    attach_parameter(model)
    assert not engine.program.watch.attached
    with pytest.raises(DsxError, match="the engine does not train its model any more"):
        train(engine)
    assert train(prepare(model)).stepped


@pytest.mark.parametrize("layout", WHOLE)
def test_a_model_that_is_prepared_again_is_trained_by_the_last_engine(layout: str) -> None:
    model = Tangle()
    first = prepare(model, layout)
    train(first)
    weights = weights_of(model)
    second = prepare(model, layout)
    with pytest.raises(DsxError, match="the engine does not train its model any more"):
        train(first)
    train(second)
    assert distance(weights_of(model), weights) > 1e-3
    model.zero_grad()
    del first, second
    gc.collect()
    model(*tokens(0, 0, 0)).backward()  # without an engine, the model is the user's own
    assert model.rows.grad is not None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_that_is_frozen_after_set_up_is_refused(layout: str) -> None:
    model = Tangle()
    engine = prepare(model, layout)
    train(engine)
    model.rows.requires_grad_(False)
    with pytest.raises(DsxError) as caught:
        train(engine)
    assert str(caught.value).splitlines() == [
        "the parameter 'rows' was frozen after set-up",
        "  expected: requires_grad as it was in dsx.prepare",
        "  remedy: freeze it before, or keep gradients from it: without one a parameter is left alone",
    ]
    model.rows.requires_grad_(True)
    assert train(engine).stepped


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_parameter_that_is_thawed_after_set_up_is_refused(layout: str) -> None:
    model = Tangle()
    engine = prepare(model, layout)
    train(engine)
    model.frozen.bias.requires_grad_(True)
    with pytest.raises(DsxError) as caught:
        train(engine)
    assert str(caught.value).splitlines() == [
        "the parameter 'frozen.bias' has a gradient, but was frozen at set-up",
        "  expected: requires_grad as it was in dsx.prepare",
        "  remedy: set requires_grad before dsx.prepare",
    ]
    assert model.frozen.bias.grad is None


def edit_everywhere(layout: str, how: str) -> dict[str, Tensor]:
    rank, model = dist.get_rank(), Tangle().double()
    engine = prepare(model, layout)
    for step in range(4):
        engine.train_step([tokens(step, 0, rank)])
        if step == 1:
            edit(model, how)
    return weights_of(engine)


def edit(model: nn.Module, how: str) -> None:
    if how == "load":
        model.load_state_dict({name: tensor * 0.5 for name, tensor in model.state_dict().items()})
    else:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)


@pytest.mark.parametrize("how", ["in place", "load"])
@pytest.mark.parametrize("layout", WHOLE)
def test_the_same_edit_on_all_ranks_counts_where_the_parameter_is_the_weight(ranks, layout: str, how: str) -> None:
    plain = Tangle().double()
    optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(4):
        for rank in range(2):
            (plain(*tokens(step, 0, rank)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            edit(plain, how)
    for weights in ranks.run(edit_everywhere, layout, how, world=2):
        assert distance(weights, weights_of(plain)) < 1e-9


@pytest.mark.parametrize("how", ["in place", "load"])
@pytest.mark.parametrize("layout", WHOLE)
def test_an_edit_that_masters_would_undo_is_refused(layout: str, how: str) -> None:
    model = Tangle()
    engine = bf16(model, layout)
    train(engine)
    with torch.no_grad():
        model.frozen.weight.mul_(0.5)  # it has no master
    train(engine)
    if how == "load":
        model.load_state_dict(model.state_dict())
        name = engine.program.layout.units[0].flats[0].segments[0].name
    else:
        name = "blocks.1.up.weight"
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.5)
    with pytest.raises(DsxError) as caught:
        train(engine)
    assert str(caught.value).splitlines() == [
        f"the parameter '{name}' was edited in place, which the next update undoes",
        "  found: its weight is kept apart from the model: in more bits, or cut into shards",
        f'  remedy: edit it within `with engine.gathered("{name}", modify=True):`, or before dsx.prepare',
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_edits_of_gathered_parameters_are_kept(layout: str) -> None:
    model = Tangle()
    engine = bf16(model, layout)
    train(engine)
    with engine.gathered(model, modify=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    train(engine)
    for name, weight in engine.weights():
        assert weight.numel() == 0 or (weight - 0.25).abs().max() < 0.01, name


def test_an_edit_of_a_shard_s_copy_is_refused() -> None:
    model = Tangle()
    engine = prepare(model, "zero3")
    train(engine)
    with engine.gathered("rows"), torch.no_grad():  # not to be modified
        model.rows.mul_(0.5)
    with pytest.raises(DsxError, match="the parameter 'rows' was edited in place, which the next update undoes"):
        train(engine)


@pytest.mark.parametrize("layout", WHOLE)
@pytest.mark.parametrize("move", [lambda model: model.double(), lambda model: model.half(), "data"])
def test_parameters_that_leave_their_buffers_are_refused(layout: str, move: Any) -> None:
    model = Tangle()
    engine = prepare(model, layout)
    train(engine)
    loss = engine(*tokens(0, 0, 0))
    engine.backward(loss)
    if move == "data":
        model.rows.data = model.rows.data.clone()
    else:
        move(model)
    with pytest.raises(DsxError, match="was moved to other memory after set-up, where nothing trains it") as caught:
        engine.step()
    assert caught.value.expected == "no model.to(...), model.half() or `parameter.data = ...` after dsx.prepare"


class Coarse(Dtypes):
    """Masters apart from every parameter."""

    def param(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def master(self, dtype: torch.dtype, source: torch.dtype) -> torch.dtype:
        return torch.float32


class CoarsePlugin:
    descriptor = Descriptor(name="coarse", section="precision", contract=1, fills={"dtypes": Fill()})

    @hook
    def dsx_precision(self) -> list[Part]:
        return [Part("dtypes", lambda ctx: Coarse())]


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(count))


def look(watch: Watch, times: int) -> None:
    for _ in range(times):
        watch.look()


def test_watching_a_thousand_parameters_costs_little_and_finds_each() -> None:
    model = Many(1000)
    engine = dsx.prepare(model, {"precision": {"use": ["coarse"]}}, plugins={"coarse": CoarsePlugin()})
    watch = engine.program.watch
    rounds = -(-1000 // SLICE)
    best = min(timeit.repeat(watch.look, number=rounds, repeat=20)) / rounds
    assert best < 100e-6, f"{best * 1e6:.0f} us"
    for number in (0, SLICE - 1, SLICE, 999):
        with torch.no_grad():
            model.weights[number].add_(1)
        with pytest.raises(DsxError, match=rf"the parameter 'weights\.{number}' was edited in place"):
            look(watch, rounds)
        watch.accept([f"weights.{number}"])


class Peeking(Tangle):
    """Uses a block's weight without calling the block."""

    def forward(self, inputs: Tensor, targets: Tensor, side: bool = False) -> Tensor:
        loss = super().forward(inputs, targets, side)
        weight = self.blocks[0].up.weight
        weight.untyped_storage().resize_(0)  # as a layout does
        return loss + nn.functional.linear(torch.ones(17), weight).sum()


def test_memory_that_is_not_there_is_explained() -> None:
    engine = prepare(Peeking())
    with pytest.raises(DsxError) as caught:
        train(engine)
    what, where, found, remedy = str(caught.value).splitlines()
    assert what == "a weight was used outside the forward of the module that holds it"
    assert where.startswith(f"  where: {__file__}:")
    assert where.endswith("return loss + nn.functional.linear(torch.ones(17), weight).sum()")
    assert found.startswith("  found: this run's layout shards parameters")
    assert remedy.startswith('  remedy: use it within `with engine.gathered("its.name"):`')
    assert isinstance(caught.value.__cause__, RuntimeError)


class Shrinking(Tangle):
    """Memory is taken away before backward needs it."""

    def forward(self, inputs: Tensor, targets: Tensor, side: bool = False) -> Tensor:
        weight = torch.full((5, 17), 0.5)
        loss = super().forward(inputs, targets, side) + torch.mv(weight, self.rows[0]).sum()
        weight.untyped_storage().resize_(0)
        return loss


def test_memory_that_is_gone_in_backward_is_explained() -> None:
    engine = prepare(Shrinking())
    loss = engine(*tokens(0, 0, 0))
    with pytest.raises(DsxError, match="a weight was used outside the forward of the module that holds it") as caught:
        engine.backward(loss)
    assert caught.value.where is None


def test_other_errors_stay_as_they_are() -> None:
    engine = prepare(Tangle())
    with pytest.raises(IndexError):
        engine(torch.full((2, 7), 99), torch.ones(2, 7, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="to be Long"):
        engine(torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 7, dtype=torch.int32))
