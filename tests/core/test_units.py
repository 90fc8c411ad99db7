"""How a model is cut into units and flat parameters."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsx.contracts import ALIGNMENT, Dtypes, Flat, Groups, Segment, Unit
from dsx.errors import DsxError
from dsx.units import blocks, flatten, plain, trainable


def cut(model: nn.Module, **choices: Any) -> tuple[Unit, ...]:
    given: dict[str, Any] = {"dtypes": Dtypes(), "groups": Groups(), "world": 1} | choices
    return flatten(model, **given)


def names(unit: Unit) -> list[str]:
    return [segment.name for flat in unit.flats for segment in flat.segments]


def placed(units: Sequence[Unit]) -> list[tuple[Unit, Flat, Segment, nn.Parameter]]:
    return [
        (unit, flat, segment, parameter)
        for unit in units
        for flat in unit.flats
        for segment, parameter in zip(flat.segments, flat.parameters, strict=True)
    ]


class Blocks(nn.Module):
    """An embedding, blocks, and a head that may be tied."""

    def __init__(self, count: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.linears = [nn.Linear(5, 5) for _ in range(count)]
        self.blocks = nn.ModuleList(self.linears)
        self.head = nn.Linear(5, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_each_block_is_a_unit_and_the_root_comes_first() -> None:
    units = cut(Blocks())
    assert [(unit.index, unit.name) for unit in units] == [(0, ""), (1, "blocks.0"), (2, "blocks.1"), (3, "blocks.2")]
    assert names(units[0]) == ["embedding.weight", "head.weight"]
    assert names(units[2]) == ["blocks.1.weight", "blocks.1.bias"]
    assert [flat.key for unit in units[:2] for flat in unit.flats] == ["root:float32", "blocks.0:float32"]


def test_the_longest_list_gives_the_blocks() -> None:
    model = nn.Module()
    model.short, model.long = nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    assert [name for name, _ in blocks(model)] == ["long.0", "long.1"]
    assert [name for name, _ in blocks(nn.ModuleList([nn.Linear(2, 2)]))] == ["0"]


def test_a_model_without_a_list_is_one_unit() -> None:
    (unit,) = cut(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    assert names(unit) == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_an_empty_list_gives_no_block() -> None:
    assert len(cut(Blocks(count=0))) == 1


def test_a_block_that_repeats_is_one_unit() -> None:
    """As in ALBERT: one block, entered several times."""
    model = Blocks(count=1)
    model.blocks = nn.ModuleList([model.blocks[0]] * 4)
    units = cut(model)
    assert [unit.name for unit in units] == ["", "blocks.0"]
    assert names(units[1]) == ["blocks.0.weight", "blocks.0.bias"]


def test_tied_outside_of_blocks_appear_once_under_the_first_name_case_37() -> None:
    model = Blocks(tied=True)
    assert names(cut(model)[0]) == ["embedding.weight"]
    assert list(trainable(model)).count("embedding.weight") == 1


def test_tied_between_blocks_live_in_the_root() -> None:
    model = Blocks()
    model.linears[2].weight = model.linears[0].weight
    units = cut(model)
    assert names(units[0]) == ["embedding.weight", "blocks.0.weight", "head.weight"]
    assert [names(unit) for unit in units[1:]] == [
        ["blocks.0.bias"],
        ["blocks.1.weight", "blocks.1.bias"],
        ["blocks.2.bias"],
    ]


def test_tied_between_a_block_and_the_rest_live_in_the_root() -> None:
    model = Blocks()
    model.outside = nn.Linear(5, 5, bias=False)
    model.outside.weight = model.linears[1].weight
    units = cut(model)
    assert "blocks.1.weight" in names(units[0])
    assert names(units[2]) == ["blocks.1.bias"]


def test_tied_within_a_block_stay_in_it() -> None:
    model = nn.Module()
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Sequential(first, second)])
    units = cut(model)
    assert names(units[2]) == ["blocks.1.0.weight", "blocks.1.0.bias", "blocks.1.1.bias"]


def test_a_module_that_two_blocks_share_lives_in_the_root() -> None:
    shared = nn.Linear(3, 3)
    model = nn.Module()
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), shared) for _ in range(2))
    assert names(cut(model)[0]) == ["blocks.0.1.weight", "blocks.0.1.bias"]


def test_dtypes_and_the_frozen_are_apart_cases_42_43() -> None:
    model = nn.Module()
    model.base = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)
    model.adapter = nn.Parameter(torch.zeros(4))
    model.codes = nn.Parameter(torch.zeros(5, dtype=torch.uint8), requires_grad=False)
    model.other = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    (unit,) = cut(model)
    assert [(flat.key, flat.dtype, flat.trainable) for flat in unit.flats] == [
        ("root:bfloat16.frozen", torch.bfloat16, False),
        ("root:float32", torch.float32, True),
        ("root:uint8.frozen", torch.uint8, False),
        ("root:bfloat16", torch.bfloat16, True),
    ]
    assert [flat.segments[0].index for flat in unit.flats] == [-1, 0, -1, 1]
    assert [flat.segments[0].group for flat in unit.flats] == ["", "all", "", "all"]


class Halves(Dtypes):
    def param(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16


def test_another_dtype_to_live_in_keeps_sources_apart() -> None:
    model = nn.Module()
    model.wide = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    model.plain = nn.Parameter(torch.zeros(3))
    model.narrow = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    model.codes = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    (unit,) = cut(model, dtypes=Halves())
    assert [(flat.key, flat.dtype, flat.source) for flat in unit.flats] == [
        ("root:bfloat16.from_float64", torch.bfloat16, torch.float64),
        ("root:bfloat16.from_float32", torch.bfloat16, torch.float32),
        ("root:bfloat16", torch.bfloat16, torch.bfloat16),
        ("root:int8.frozen", torch.int8, torch.int8),
    ]


def test_groups_are_asked_about_the_trained_only() -> None:
    class Biases(Groups):
        def assign(self, name: str, parameter: nn.Parameter) -> str:
            assert parameter.requires_grad
            return "biases" if name.endswith("bias") else "all"

    model = Blocks(count=1)
    model.head.requires_grad_(False)
    assert [segment.group for _, _, segment, _ in placed(cut(model, groups=Biases()))] == ["all", "", "all", "biases"]


def test_a_limit_cuts_between_parameters() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (10, 10, 10, 100, 1)])
    (unit,) = cut(model, limit_bytes=80)
    assert [(flat.key, [segment.name for segment in flat.segments]) for flat in unit.flats] == [
        ("root:float32", ["0", "1"]),
        ("root:float32.2", ["2"]),
        ("root:float32.3", ["3"]),
        ("root:float32.4", ["4"]),
    ]


def test_the_limit_is_in_bytes_of_the_dtype_to_live_in() -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(10)) for _ in range(4)])
    (unit,) = cut(model, limit_bytes=80, dtypes=Halves())
    assert [len(flat.segments) for flat in unit.flats] == [4]


def test_blocks_may_be_chosen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    units = cut(model, choose=lambda model: [("1", model[1])])
    assert [names(unit) for unit in units] == [["0.weight", "0.bias"], ["1.weight", "1.bias"]]


def test_a_compiled_model_has_the_names_of_its_own() -> None:
    model = Blocks()
    wrapper = nn.Module()
    wrapper._orig_mod = model
    assert plain(wrapper) is model
    assert [names(unit) for unit in cut(wrapper)] == [names(unit) for unit in cut(model)]


def test_a_sparse_parameter_is_refused_by_name() -> None:
    model = nn.Module()
    model.inner = nn.Module()
    model.inner.table = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(DsxError, match=r"'inner.table' has the layout torch.sparse_coo") as caught:
        cut(model)
    assert caught.value.expected == "a dense tensor"


shapes = st.sampled_from([(), (0,), (1,), (7,), (1, 17), (3, 0, 2), (5, 3), (33,), (2, 3, 4)])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float64])
parameters = st.builds(
    lambda shape, dtype, grad: nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=grad),
    shapes,
    dtypes,
    st.booleans(),
)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """Blocks and a rest, of any parameters, any of which may be the same object in several places."""
    pool = draw(st.lists(parameters, min_size=1, max_size=6))
    some = st.lists(st.sampled_from(pool), min_size=0, max_size=4)
    model = nn.Module()
    model.rest = nn.ParameterList(draw(some))
    members = [nn.ParameterList(draw(some)) for _ in range(draw(st.integers(0, 3)))]
    repeats = draw(st.lists(st.sampled_from(members), max_size=2)) if members else []
    model.blocks = nn.ModuleList([*members, *repeats])
    return model


@settings(deadline=None)
@given(
    model=models(),
    world=st.integers(1, 4),
    block=st.sampled_from([1, 3, 64]),
    limit=st.sampled_from([None, 1, 64, 300]),
)
def test_laws_of_flat_parameters(model: nn.Module, world: int, block: int, limit: int | None) -> None:
    units = cut(model, world=world, block=block, limit_bytes=limit)
    flats = [flat for unit in units for flat in unit.flats]
    align = math.lcm(ALIGNMENT, block)
    known = dict(model.named_parameters())
    assert Counter(segment.name for _, _, segment, _ in placed(units)) == Counter(list(known))
    assert len({flat.key for flat in flats}) == len(flats)
    for _, flat, segment, parameter in placed(units):
        assert parameter is known[segment.name]
        assert segment.shape == parameter.shape
        assert (segment.start % align, segment.stop - segment.start) == (0, parameter.numel())
        assert (flat.source, flat.trainable) == (parameter.dtype, parameter.requires_grad)
        assert segment.index == (list(trainable(model)).index(segment.name) if parameter.requires_grad else -1)
    for flat in flats:
        bounds = [bound for segment in flat.segments for bound in (segment.start, segment.stop)] + [flat.size]
        assert bounds == sorted(bounds)
        assert flat.size % (world * align) == 0
        assert limit is None or len(flat.segments) == 1 or _bytes(flat) <= limit


def _bytes(flat: Flat) -> int:
    return sum(parameter.numel() for parameter in flat.parameters) * flat.dtype.itemsize


@settings(deadline=None)
@given(model=models())
def test_a_parameter_lives_in_the_lowest_unit_that_holds_all_its_uses(model: nn.Module) -> None:
    units = cut(model)
    for unit, _, _, parameter in placed(units):
        holders = {
            next((other.index for other in units[1:] if module in other.modules), 0)
            for module in model.modules()
            if any(own is parameter for own in module.parameters(recurse=False))
        }
        assert unit.index == (holders.pop() if len(holders) == 1 else 0)
