"""In which order a thread updates shards, while another one decides what the update is."""

from __future__ import annotations

import threading

import pytest
import torch
from attrs import evolve

from dsx.contracts import Flat, Hyper, Job, Segment, Shard
from dsx_offload.turns import Turns, alike


def shard(number: int) -> Shard:
    segment = Segment(f"p{number}", 0, 8, torch.Size([8]), "default", number)
    return Shard(Flat(f"f{number}", torch.float32, torch.float32, True, (segment,), (), 8), 0, 8, (0, 8))


SHARDS = [shard(number) for number in range(5)]
JOB = Job({"default": Hyper({"lr": 1.0})}, 1.0, (True,) * 5, (1,) * 5, 1)
CLIPPED = evolve(JOB, multiplier=0.5)


def expecting(*shards: int) -> Turns:
    turns = Turns(SHARDS)
    turns.job = JOB
    assert turns.add(SHARDS[number] for number in shards) == bool(shards)
    return turns


def numbers(turns: Turns) -> list[int]:
    """Whose turns come, one after another; each is made."""
    found = []
    while (turn := turns.next()) is not None:
        found.append(SHARDS.index(turn.shard))
        turns.made(turn)
    return found


def test_what_is_used_first_comes_first() -> None:
    assert numbers(expecting(4, 1, 3)) == [1, 3, 4]


def test_somebody_is_called_only_when_nobody_is_at_work() -> None:
    turns = expecting(4)
    assert not turns.add([SHARDS[3]])
    assert numbers(turns) == [3, 4]
    assert turns.add([SHARDS[2]])
    assert not Turns(SHARDS).add([])


def test_what_was_prepared_comes_before_what_was_not_until_there_is_haste() -> None:
    turns = expecting(4, 3)
    ahead = turns.upcoming()
    assert next(ahead) is SHARDS[2], "of those that are not final yet, the one that was before the last one last time"
    assert next(ahead) is SHARDS[3]
    turns.add([SHARDS[1], SHARDS[0]])
    turn = turns.next()
    assert turn is not None and turn.shard is SHARDS[3]
    turns.made(turn)
    ahead = turns.upcoming()
    assert [next(ahead) for _ in range(2)] == [SHARDS[2], SHARDS[0]]
    turns.decide(JOB)
    turns.add([SHARDS[2]])
    assert next(turns.upcoming()) is SHARDS[0]
    assert numbers(turns) == [0, 1, 2, 4]


def test_the_order_of_the_last_time_is_expected() -> None:
    turns = expecting()
    for number in (1, 4, 0):
        turns.add([SHARDS[number]])
    numbers(turns)
    turns.decide(JOB)
    turns.add([SHARDS[2], SHARDS[3]])
    numbers(turns)
    turns.reset()
    assert [SHARDS.index(shard) for shard in turns.upcoming()] == [1, 4, 0, 3, 2]


def test_what_was_made_for_another_job_is_told() -> None:
    turns = expecting(4, 3)
    numbers(turns)
    assert turns.begun() == {SHARDS[3], SHARDS[4]}
    assert set(turns.decide(CLIPPED)) == {SHARDS[3], SHARDS[4]}
    assert turns.begun() == set() and not turns.wait(SHARDS[3], patient=False)


def test_what_is_at_work_when_another_job_is_decided_has_its_turn_again() -> None:
    turns = expecting(4, 3)
    turn = turns.next()
    assert turn is not None and turn.shard is SHARDS[3] and not turn.decided
    assert turns.decide(CLIPPED) == set() and SHARDS[3] in turns.known()
    assert not turns.made(turn)
    turn = turns.next()
    assert turn is not None and turn.shard is SHARDS[3] and turn.decided and turn.job is CLIPPED
    assert turns.made(turn)


def test_whoever_waits_hears_of_a_shard_and_of_a_failure() -> None:
    turns = expecting(4, 3)
    heard: list[bool] = []
    waiter = threading.Thread(target=lambda: heard.extend([turns.wait(SHARDS[3]), turns.wait(SHARDS[4])]))
    waiter.start()
    turn = turns.next()
    assert turn is not None
    turns.made(turn)
    turns.fail(OSError("gone"))
    waiter.join(10)
    assert heard == [True, False] and isinstance(turns.failure, OSError)
    assert turns.reset() == {SHARDS[3]}
    assert turns.add([SHARDS[0]])


def test_to_take_back_is_to_wait_for_what_is_at_work() -> None:
    turns = expecting(4, 3, 2)
    turn = turns.next()
    assert turn is not None and turn.shard is SHARDS[2]
    assert not turns.take_back(SHARDS[3]) and not turns.take_back(SHARDS[0])
    threading.Timer(0.1, turns.made, [turn]).start()
    assert turns.take_back(SHARDS[2])
    assert numbers(turns) == [4]


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (evolve(JOB, used=(True, False, True, True, True)), [0, 2, 3, 4]),
        (evolve(JOB, steps=(1, 1, 2, 1, 1)), [0, 1, 3, 4]),
        (evolve(JOB, hypers={"default": Hyper({"lr": 2.0})}), []),
        (CLIPPED, []),
        (evolve(JOB, number=2), []),
        (evolve(JOB), [0, 1, 2, 3, 4]),
    ],
)
def test_jobs_are_alike_for_a_shard_if_they_make_the_same_of_it(other: Job, same: list[int]) -> None:
    assert [number for number, shard in enumerate(SHARDS) if alike(shard, JOB, other)] == same
