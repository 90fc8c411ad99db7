"""Memory behind a fixed address, and `zero3` over it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.testing import distance, train_plain, weights_of
from dsx.testing.models import Tangle, tokens
from dsx_zero import residence
from dsx_zero.rooms import Mapped, Pool, Resized, Room, mappable

CPU = torch.device("cpu")
linux = pytest.mark.skipif(not mappable(CPU), reason="the kernel cannot move pages and keep the address (Linux 5.7)")


def rooms(count: int, size: int) -> list[tuple[Room, Tensor]]:
    pool, made = Pool(), []
    for _ in range(count):
        room = Mapped(pool, size * 4)
        made.append((room, room.tensor(size, torch.float32)))
    return made


@linux
def test_rooms_of_one_size_hand_their_pages_on() -> None:
    size = 700_001
    (one, first), (other, second) = rooms(2, size)
    places = first.data_ptr(), second.data_ptr()
    for step in range(5):
        one.fill()
        one.fill()
        first.fill_(step)
        view = first[5:9].view(2, 2)
        one.empty()
        one.empty()
        other.fill()
        assert second[-1] == step, "the same pages"
        assert one.bytes() == 0
        assert other.bytes() >= size * 4
        second.fill_(-1.0)
        one.fill()
        first.fill_(7)
        assert (second == -1).all(), "two that are full at once are apart"
        assert view.tolist() == [[7, 7], [7, 7]]
        one.empty()
        other.empty()
    assert places == (first.data_ptr(), second.data_ptr())


@linux
def test_a_tensor_may_outlive_its_room() -> None:
    ((room, tensor),) = rooms(1, 600_000)
    room.fill()
    tensor.fill_(3)
    view = tensor[-5:]
    del room, tensor
    assert view.tolist() == [3.0] * 5


def test_a_storage_is_emptied_and_filled() -> None:
    tensor = torch.ones(1000)
    room = Resized(tensor)
    room.empty()
    assert room.bytes() == 0
    room.fill()
    assert room.bytes() == 4000
    assert tensor.fill_(2).sum() == 2000


def trained(smallest: int) -> tuple[dict[str, Tensor], int]:
    before, residence.SMALLEST_MAPPED = residence.SMALLEST_MAPPED, smallest
    try:
        engine = dsx.prepare(Tangle().double(), {"partition": {"use": ["zero3"]}, "batch": {"accumulation": 2}})
    finally:
        residence.SMALLEST_MAPPED = before
    for step in range(4):
        engine.train_step([tokens(step, micro, dist.get_rank()) for micro in range(2)])
        with torch.no_grad():
            engine(*tokens(step, 0, 0))
    layout: Any = engine.program.layout
    return weights_of(engine), layout.memory.bytes()


@linux
@pytest.mark.parametrize("smallest", [0, 1 << 40])
def test_zero3_trains_like_one_process_over_either(ranks, smallest: int) -> None:
    model = Tangle().double()
    train_plain(model, tokens, steps=4, world=3, accumulation=2)
    for weights, live in ranks.run(trained, smallest, world=3):
        assert distance(weights, weights_of(model)) < 1e-9
        assert live == 0
