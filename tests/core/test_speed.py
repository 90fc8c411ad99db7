"""The estimate of an update's time: what it adds up, and what goes on behind what."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from dsx.errors import DsxError
from dsx.plan.profile import Exchange, Machine, Profile
from dsx.plan.speed import estimate
from dsx.plan.work import Work

PROFILE = Profile(
    machine=Machine("a CPU", 2, "2.13.0", "cpu"),
    kind="cpu",
    ranks=2,
    threads=1,
    when="2026-11-29T20:00:00+00:00",
    flops_per_s={"float32": 100.0, "bfloat16": 400.0},
    moved_per_s=10.0,
    updated_per_s=20.0,
    seconds_per_call=0.5,
    exchange=Exchange(gathered_per_s=8.0, reduced_per_s=4.0, seconds_per_message=0.25, overlap=0.5),
)
"""Slow enough to reckon by hand."""


def work(**changes: Any) -> Work:
    """600 flops, 6 s of them; 20 bytes, 2 s; 4 calls, 2 s: 10 s of forward and backward. 40 bytes of update, 2 s."""
    still = Work(flops={"float32": 600}, moved=20, updated=40, calls=4, sent={}, messages={})
    return evolve(still, **changes)


def test_each_kind_of_work_at_its_own_rate() -> None:
    found = estimate(work(flops={"float32": 600, "bfloat16": 800}), PROFILE, 1)
    assert (found.compute, found.memory, found.update, found.calls) == (8.0, 2.0, 2.0, 2.0)
    assert (found.exchange, found.hidden) == (0.0, 0.0)
    assert found.total == 14.0


def test_a_collective_takes_its_bytes_and_a_message() -> None:
    sent = {"reduce": 8, "gather": 8, "publish": 16, "vote": 0}
    found = estimate(work(sent=sent, messages={"reduce": 2, "gather": 4, "publish": 1, "vote": 1}), PROFILE, 1)
    assert found.exchange == pytest.approx((2 + 0.5) + (1 + 1) + (2 + 0.25) + 0.25)


def test_the_measured_part_of_what_can_go_on_behind_is_free() -> None:
    found = estimate(work(sent={"reduce": 8}, messages={"reduce": 0}), PROFILE, 1)
    assert (found.exchange, found.hidden) == (2.0, 1.0)
    assert found.total == 13.0


def test_an_exchange_that_is_in_the_way_costs_more_than_its_time() -> None:
    exchange = evolve(PROFILE.exchange, overlap=-0.5)
    found = estimate(work(sent={"reduce": 8}, messages={"reduce": 0}), evolve(PROFILE, exchange=exchange), 1)
    assert (found.exchange, found.hidden, found.total) == (2.0, -1.0, 15.0)


def test_over_a_link_all_of_it_is_free_as_long_as_there_is_something_before_it() -> None:
    reduces = work(sent={"reduce": 20}, messages={"reduce": 0})
    found = estimate(reduces, PROFILE, 1, link_bytes_per_s=1.0)
    assert found.exchange == 20.0
    assert found.hidden == pytest.approx(10 * 2 / 3)
    assert estimate(reduces, PROFILE, 1, link_bytes_per_s=10.0).hidden == 2.0


def test_reductions_go_on_behind_the_backwards_that_make_them() -> None:
    reduces = work(sent={"reduce": 20}, messages={"reduce": 0})
    assert estimate(reduces, PROFILE, 4, 1.0).hidden == pytest.approx(10 * 2 / 3 / 4)
    assert estimate(reduces, PROFILE, 4, 1.0, reducing=4).hidden == pytest.approx(10 * 2 / 3)


def test_gathers_have_what_reductions_leave_of_forward_and_backward() -> None:
    exchanges = work(sent={"reduce": 20, "gather": 20}, messages={"reduce": 0, "gather": 0})
    assert estimate(exchanges, PROFILE, 1, 1.0).hidden == pytest.approx(10.0)
    assert estimate(work(sent={"gather": 3}, messages={"gather": 0}), PROFILE, 1, 1.0).hidden == 3.0


def test_publishing_goes_on_behind_the_update_and_a_vote_behind_nothing() -> None:
    assert estimate(work(sent={"publish": 20}, messages={"publish": 0}), PROFILE, 1, 1.0).hidden == 2.0
    assert estimate(work(sent={"vote": 20}, messages={"vote": 0}), PROFILE, 1, 1.0).hidden == 0.0


def test_a_gpu_waits_only_for_calls_that_take_longer_than_its_work() -> None:
    gpu = evolve(PROFILE, kind="cuda")
    assert estimate(work(calls=20), gpu, 1).calls == 0.0
    assert estimate(work(calls=24), gpu, 1).calls == 2.0


def test_one_rank_exchanges_nothing_and_needs_no_rate() -> None:
    alone = evolve(PROFILE, ranks=1, exchange=None)
    assert estimate(work(sent={"vote": 0}, messages={"vote": 1}), alone, 1).exchange == 0.0


def test_a_profile_of_one_rank_cannot_tell_of_exchanges_without_a_link() -> None:
    alone = evolve(PROFILE, ranks=1, exchange=None)
    reduces = work(sent={"reduce": 20}, messages={"reduce": 1})
    with pytest.raises(DsxError) as caught:
        estimate(reduces, alone, 1)
    assert "knows no exchange between ranks" in str(caught.value)
    assert "run `dsx doctor --profile --nproc 2`, or say what the link carries with --link" in str(caught.value)
    assert estimate(reduces, alone, 1, 2.0).exchange == 10.0


def test_a_dtype_that_was_not_measured_is_named() -> None:
    with pytest.raises(DsxError, match="matrix products in complex64 were not measured") as caught:
        estimate(work(flops={"complex64": 1}), PROFILE, 1)
    assert "float32, bfloat16" in str(caught.value)
