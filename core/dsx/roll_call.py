"""What all ranks must enter together begins with a roll-call: a rank that does not come is named, instead of waited for
without end."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from dsx.contracts import Transport
from dsx.errors import RankMismatch

ROLL_CALL_S = 60.0

_PREFIX = "dsx/roll_call"


def roll_call(transport: Transport, what: str, timeout_s: float = ROLL_CALL_S, content: object = None) -> None:
    """Wait until every rank has come here: some tenths of a millisecond on one host.

    what       the call, in words
    timeout_s  how long to wait for the others
    content    more of the call, by its `repr`

    Raises `RankMismatch`, on the ranks that came, naming those that did not; or on all, where they came to different
    calls.
    """
    if transport.world == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    rank, counter = transport.rank, f"{_PREFIX}s_of/{transport.rank}"
    number = store.add(counter, 1)
    places = [f"{_PREFIX}/{number}/{other}" for other in range(transport.world)]
    store.set(places[rank], f"{what}\n{hashlib.sha256(repr(content).encode()).hexdigest()}")
    try:
        store.wait(places, timedelta(seconds=timeout_s))
    except RuntimeError:
        if absent := [other for other, place in enumerate(places) if not store.check([place])]:
            # Who was not waited for must not find this call, should the run go on; who still waits must not miss it.
            store.set(f"{places[rank]}/left", "")
            store.delete_key(places[rank])
            store.add(counter, -1)
            never = [other for other in absent if not store.check([f"{places[other]}/left"])]
            raise _absent(what, never or absent, transport.world, timeout_s) from None
    if number > 2:  # all are in this call, so nobody reads the one before the last any more
        store.delete_key(f"{_PREFIX}/{number - 2}/{rank}")
    several = store.has_extended_api()  # type: ignore[attr-defined]
    calls = store.multi_get(places) if several else [store.get(place) for place in places]
    _compare([call.decode() for call in calls])


def _absent(what: str, missing: Sequence[int], world: int, timeout_s: float) -> RankMismatch:
    return RankMismatch(
        f"{what} was not entered by rank {', '.join(map(str, missing))} within {timeout_s:g} s",
        ranks=missing,
        expected=f"all {world} ranks call it",
        remedy="call it on every rank, not on the first one only",
    )


def _compare(calls: Sequence[str]) -> None:
    """Every rank compares the same calls, so all raise or none does."""
    odd = [rank for rank, call in enumerate(calls) if call != calls[0]]
    if odd:
        (first, _), (other, _) = (calls[rank].split("\n") for rank in (0, odd[0]))
        raise RankMismatch(
            f"the ranks call different things: {first} on rank 0, {other} on rank {odd[0]}",
            ranks=odd,
            found="different arguments" if first == other else None,
            remedy="make the same calls on every rank, in the same order and with the same arguments",
        )
