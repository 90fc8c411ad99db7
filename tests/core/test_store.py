"""The store that parts see sends each state to the tier that claimed it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsx.contracts import Kind, Span, Tier
from dsx.errors import DsxError
from dsx.store import Router


class Noting(Tier):
    """Claims some names, and notes what it was asked."""

    def __init__(self, *claimed: str) -> None:
        super().__init__()
        self.claimed, self.asked = claimed, list[tuple[object, ...]]()

    def claims(self, name: str, size: int) -> bool:
        return name in self.claimed

    def prefetch(self, key: str, read: Sequence[str], span: Span | None = None) -> None:
        self.asked.append(("prefetch", key, list(read), span))

    def fetch(
        self,
        key: str,
        read: Sequence[str] = (),
        write: Sequence[str] = (),
        into: Tensor | None = None,
        span: Span | None = None,
    ) -> dict[str, Tensor]:
        self.asked.append(("fetch", key, list(read), list(write), into is not None, span))
        return super().fetch(key, read, write, into, span)

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        self.asked.append(("put", key, list(dirty), list(clean)))

    def drain(self) -> None:
        self.asked.append(("drain",))

    def close(self) -> None:
        self.asked.append(("close",))


@pytest.fixture
def tiers() -> tuple[Noting, Noting, Tier]:
    return Noting("exp_avg", "exp_avg_sq"), Noting("exp_avg_sq", "master"), Tier()


@pytest.fixture
def store(tiers: tuple[Noting, Noting, Tier]) -> Router:
    """The flat parameter "a" with all four states, "b" with one."""
    disk, host, device = tiers
    router = Router([("disk", disk), ("host", host)], device)
    for number, name in enumerate(("master", "exp_avg", "exp_avg_sq", "param")):
        router.create("a", name, torch.full((3,), float(number)))
    router.create("b", "exp_avg", torch.zeros(5))
    return router


def test_a_state_rests_in_the_first_tier_that_claims_it(store: Router, tiers: tuple[Noting, Noting, Tier]) -> None:
    disk, host, device = tiers
    assert list(disk.names("a")) == ["exp_avg", "exp_avg_sq"]
    assert list(host.names("a")) == ["master"]
    assert list(device.names("a")) == ["param"]
    assert list(store.names("a")) == ["master", "exp_avg", "exp_avg_sq", "param"]
    assert list(store.names("b")) == ["exp_avg"]
    assert list(store.names("unheard of")) == []


def test_fetch_asks_each_tier_once_for_its_own(store: Router, tiers: tuple[Noting, Noting, Tier]) -> None:
    disk, host, _ = tiers
    found = store.fetch("a", ["exp_avg", "master", "param"], ["exp_avg_sq"])
    assert {name: tensor[0].item() for name, tensor in found.items()} == {
        "master": 0,
        "exp_avg": 1,
        "exp_avg_sq": 2,
        "param": 3,
    }
    assert disk.asked == [("fetch", "a", ["exp_avg"], ["exp_avg_sq"], False, None)]
    assert host.asked == [("fetch", "a", ["master"], [], False, None)]


def test_what_is_only_written_is_not_read(store: Router, tiers: tuple[Noting, Noting, Tier]) -> None:
    disk, host, _ = tiers
    assert list(store.fetch("a", write=["exp_avg"])) == ["exp_avg"]
    assert disk.asked == [("fetch", "a", [], ["exp_avg"], False, None)]
    assert host.asked == []


def test_fetch_into_fills_and_lends_nothing(store: Router, tiers: tuple[Noting, Noting, Tier]) -> None:
    buffer = torch.zeros(4)[1:]
    assert store.fetch("a", ["exp_avg_sq"], into=buffer) == {}
    assert buffer.tolist() == [2, 2, 2]
    assert tiers[0].asked == [("fetch", "a", ["exp_avg_sq"], [], True, None)]


def test_what_is_fetched_is_the_state_itself(store: Router) -> None:
    store.fetch("a", ["param"])["param"].fill_(9)
    store.put("a", ["param"])
    assert store.fetch("a", ["param"])["param"].tolist() == [9, 9, 9]


def test_prefetch_and_put_reach_the_tiers_that_hold_something(
    store: Router, tiers: tuple[Noting, Noting, Tier]
) -> None:
    disk, host, _ = tiers
    store.prefetch("a", ["exp_avg_sq", "exp_avg"])
    store.put("a", dirty=["exp_avg"], clean=["exp_avg_sq", "param"])
    assert disk.asked == [
        ("prefetch", "a", ["exp_avg_sq", "exp_avg"], None),
        ("put", "a", ["exp_avg"], ["exp_avg_sq"]),
    ]
    assert host.asked == []


def test_a_part_of_a_state_can_be_borrowed(store: Router) -> None:
    store.fetch("a", ["param"], span=(1, 2))["param"].fill_(9)
    store.put("a", dirty=["param"])
    assert store.fetch("a", ["param"])["param"].tolist() == [3, 9, 3]


def test_what_a_state_is_like(store: Router) -> None:
    assert store.kind("b", "exp_avg") == Kind(5, torch.float32)
    assert store.kind("b", "exp_avg").bytes == 20


def test_bytes_are_counted_over_all_tiers(store: Router) -> None:
    assert store.bytes() == {"exp_avg": 4 * (3 + 5), "exp_avg_sq": 12, "master": 12, "param": 12}


def test_drain_and_close_reach_every_tier(store: Router, tiers: tuple[Noting, Noting, Tier]) -> None:
    store.drain()
    store.close()
    assert tiers[0].asked == tiers[1].asked == [("drain",), ("close",)]
    assert store.bytes()["exp_avg"] == 32  # those two keep what they have; core's own lets go
    assert "param" not in store.bytes()


def test_a_claim_to_nothing_is_refused() -> None:
    router = Router([("disk", Noting("exp_avg")), ("host", Noting("momentum"))], Tier())
    for name in ("exp_avg", "param"):
        router.create("a", name, torch.zeros(1))
    with pytest.raises(DsxError) as caught:
        router.refuse_idle_claims()
    assert str(caught.value).splitlines() == [
        "'host' claims states that this run does not have",
        "  where: [partition]",
        "  found: states in this run: exp_avg, param",
        "  remedy: change its `states`, or remove 'host'",
    ]


def test_claims_that_hold_something_pass(store: Router) -> None:
    store.refuse_idle_claims()
