"""Reading the memory of ranks on the same host: the same results as by sockets, and words where it fails."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.defaults import direct as module
from dsx.defaults.collectives import Collectives
from dsx.defaults.direct import OFF, Direct
from dsx.defaults.line import Line
from dsx.defaults.words import Meeting, Words, close
from dsx.testing import distance, train_plain, weights_of
from dsx.testing.models import Tangle, tokens

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@contextmanager
def everything(direct: bool = True) -> Iterator[None]:
    """Transports made within read tensors of any size, or none."""
    before, module.SMALLEST = module.SMALLEST, 0
    os.environ[OFF] = str(int(direct))
    try:
        yield
    finally:
        module.SMALLEST = before
        del os.environ[OFF]


def transport(direct: bool) -> Collectives:
    with everything(direct):
        return Collectives(CPU)


def random(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    noise = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 50
    return noise.abs().to(dtype) if dtype == torch.uint8 else noise.to(dtype)


def operations(direct: bool, size: int) -> list[Tensor]:
    """Results of every operation, all under way at once, several on one channel."""
    x = transport(direct)
    assert x._direct.everywhere is direct or x.world == 1
    results, handles = [], []
    for number, dtype in enumerate(DTYPES):
        where: dict[str, Any] = {"channel": "reduce" if number % 2 else "gather", "purpose": "state"}
        mine, whole = random(size, dtype, x.rank), random(size * x.world, dtype, 10 + x.rank)
        out, every = torch.zeros(size, dtype=dtype), torch.zeros(size * x.world, dtype=dtype)
        summed, place = whole.clone(), whole.clone()
        here = place[x.rank * size : (x.rank + 1) * size]
        op = "mean" if dtype.is_floating_point else "sum"
        ins = [random(1 + size * (1 + peer), dtype, 100 * x.rank + peer) for peer in range(x.world)]
        outs = [torch.zeros(1 + size * (1 + x.rank), dtype=dtype) for _ in range(x.world)]
        handles += [
            x.all_gather(every, mine, **where),
            x.reduce_scatter(out, whole, op, **where),
            x.reduce_scatter(here, place, "sum", **where),
            x.all_reduce(summed, op, **where),
            x.all_to_all(outs, ins, **where),
        ]
        results += [every, out, here, summed, *outs]
    for handle in handles:
        handle.wait()
        handle.wait()
    x.close()
    return results


@pytest.mark.parametrize("size", [0, 1, 4097, (1 << 18) + 5])
@pytest.mark.parametrize("world", [2, 3])
def test_reading_gives_the_same_bits_as_sending(ranks, world: int, size: int) -> None:
    read, sent = (ranks.run(operations, direct, size, world=world) for direct in (True, False))
    for rank in range(world):
        for number, (one, other) in enumerate(zip(read[rank], sent[rank], strict=True)):
            if one.dtype in (torch.float32, torch.float64) and number % (4 + world) == 3:
                assert torch.allclose(one, other, rtol=1e-5, atol=1e-4), "gloo's all_reduce adds in another order"
            else:
                assert torch.equal(one, other), (rank, number)


def trained(layout: str, overlap: bool) -> dict[str, Tensor]:
    manifest: dict[str, Any] = {"run": {"overlap_publish": overlap}, "batch": {"accumulation": 2}}
    if layout != "replicated":
        manifest["partition"] = {"use": [layout]}
    with everything():
        engine = dsx.prepare(Tangle().double(), manifest)
    for step in range(4):
        engine.train_step([tokens(step, micro, dist.get_rank()) for micro in range(2)])
    return weights_of(engine)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layout", ["replicated", "zero1", "zero2", "zero3"])
def test_layouts_train_like_one_process(ranks, layout: str, overlap: bool) -> None:
    model = Tangle().double()
    train_plain(model, tokens, steps=4, world=3, accumulation=2)
    for weights in ranks.run(trained, layout, overlap, world=3):
        assert distance(weights, weights_of(model)) < 1e-9


def alone_in_waiting() -> float:
    """Rank 0 waits for its result while rank 1 does something else for a while."""
    x = transport(True)
    whole = torch.full((1 << 16,), float(x.rank))
    handle = x.reduce_scatter(whole[: 1 << 15].clone(), whole, channel="reduce", purpose="reduce")
    if x.rank == 1:
        time.sleep(1.5)
    started = time.monotonic()
    handle.wait()
    took = time.monotonic() - started
    dist.barrier()
    x.close()
    return took


def test_an_operation_goes_on_while_a_rank_does_not_wait_for_it(ranks) -> None:
    first, _ = ranks.run(alone_in_waiting, world=2)
    assert first < 1.0


def dying() -> None:
    """Rank 1 ends within an operation."""
    x = transport(True)
    whole = torch.zeros(1 << 20)
    if x.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x.reduce_scatter(whole[: 1 << 19], whole, channel="reduce", purpose="reduce").wait()


def test_a_rank_that_ends_is_noticed(ranks) -> None:
    started = time.monotonic()
    errors = ranks.errors(dying, world=2)
    assert all(errors)
    assert time.monotonic() - started < 20


def test_what_cannot_be_read_is_named() -> None:
    here = Direct([0, os.getpid()], everywhere=True)
    with pytest.raises(ConnectionError, match=f"the memory of rank 1, process {os.getpid()}, cannot be read"):
        here.read(1, 8, torch.zeros(4))


def test_a_line_raises_in_wait_and_goes_on() -> None:
    line, seen = Line(), []
    bad, good = line.add(lambda: 1 / 0), line.add(lambda: seen.append(1))
    good.wait()
    assert seen == [1]
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            bad.wait()


def pair(timeout_s: float = 60) -> tuple[Words, Words]:
    """Ranks 0 and 1 of a channel, in one process: (what 0 has, what 1 has)."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Words({1: first}, timeout_s), Words({0: second}, timeout_s)


def test_words_are_heard_by_their_tags_in_any_order() -> None:
    here, there = pair()
    for tag in range(5):
        assert here.tell(1, tag, -(tag**9))
    assert [there.hear(0, tag) for tag in (3, 0, 4, 1, 2)] == [-(tag**9) for tag in (3, 0, 4, 1, 2)]


def test_who_does_not_wait_learns_that_there_is_no_room() -> None:
    here, there = pair()
    told = 0
    while here.tell(1, told, told, wait=False):
        told += 1
    assert [there.hear(0, tag) for tag in range(told)] == list(range(told))
    assert here.tell(1, told, 7, wait=False)
    assert there.hear(0, told) == 7


def test_a_silent_rank_and_one_that_is_gone_are_named() -> None:
    here, there = pair(0.05)
    with pytest.raises(TimeoutError, match=r"rank 1 of this host has not answered for 0\.05 seconds"):
        here.hear(1, 0)
    there.close()
    for _ in range(2):
        with pytest.raises(ConnectionError, match="rank 1 of this host is gone"):
            here.hear(1, 0)
    with pytest.raises(ConnectionError, match="rank 1 of this host is gone"):
        here.tell(1, 0, 0)


def test_strangers_are_not_met() -> None:
    here, there = Meeting(0, 8), Meeting(1, 8)
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect(f"\0dsx-{there.name:016x}")
    stranger.send(b"hello")
    called = here.call(there.name, 2)
    assert called
    came = there.take([0], 2)
    for number, line in enumerate(came[0]):
        called[number].send(bytes([number]))
        assert line.recv(1) == bytes([number])
    assert stranger.recv(1) == b""
    there.close()
    assert here.call(there.name, 1) is None
    here.close()
    close([stranger, *called, *came[0]])


def test_a_rank_whose_queue_is_full_is_not_waited_for() -> None:
    here, there = Meeting(0, 1), Meeting(1, 1)
    assert here.call(there.name, 8) is None
    here.close()
    there.close()


def many(count: int) -> bool:
    """One rank starts more operations than there is room to tell of, before the other starts one."""
    x = transport(True)
    tensors = [torch.full((8,), float(x.rank)) for _ in range(count)]
    if x.rank == 1:
        time.sleep(0.5)
    handles = [x.all_reduce(tensor, "sum", channel="reduce", purpose="reduce") for tensor in tensors]
    for handle in handles:
        handle.wait()
    dist.barrier()
    x.close()
    return all(bool((tensor == 1).all()) for tensor in tensors)


def test_more_operations_than_words_have_room_for(ranks) -> None:
    assert ranks.run(many, 1000, world=2) == [True, True]
