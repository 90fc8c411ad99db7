"""From what an update does and what a machine can do to how long it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import frozen

from dsx.errors import DsxError
from dsx.plan.profile import Profile
from dsx.plan.work import Work

_BACKWARD = 2 / 3
"""Of forward and backward: two of a layer's three products, and their like of what lies between."""


@frozen
class Estimate:
    """Seconds of one update.

    compute   matrix products
    memory    other operations of forward and backward
    update    the optimizer's
    calls     Python and torch; on a GPU, what of that the GPU has to wait for
    exchange  between ranks
    hidden    how much of the exchange goes on behind the others; below 0, what it slows them down by
    """

    compute: float
    memory: float
    update: float
    calls: float
    exchange: float
    hidden: float

    @property
    def total(self) -> float:
        """From one update to the next."""
        return self.compute + self.memory + self.update + self.calls + self.exchange - self.hidden


def estimate(
    work: Work,
    profile: Profile,
    accumulation: int,
    link_bytes_per_s: float | None = None,
    *,
    reducing: int = 1,
) -> Estimate:
    """The time of an update.

    accumulation      micro-batches of the update
    link_bytes_per_s  what a rank sends to other hosts in a second; None: all ranks are on one host, as measured
    reducing          in how many of the micro-batches gradients are reduced: 1 where it is done once, in the last

    The model is plain. Products take their flops at the measured rate of their dtype; everything else of forward and
    backward its bytes at the measured rate, and each operation a call, which a GPU runs behind; the update its bytes.
    An exchange takes the bytes that leave the rank at the measured or given rate, and each collective the time of an
    empty one. Reductions go on behind the backwards (two thirds of the work) that make them, gathers behind what is
    left of forward and backward, publishing behind the update, everything else behind nothing; on one host only the
    measured part of what goes on behind is free, over a link all of it. Neglected: waiting for slower ranks, what the
    first gather and the last reduction cannot hide behind, the layout's own bookkeeping, data, evaluation and
    checkpoints.

    Raises `DsxError` for a dtype or an exchange of which the profile knows nothing.
    """
    compute = sum(flops / _pace(profile, dtype) for dtype, flops in work.flops.items())
    memory = work.moved / profile.moved_per_s
    update = work.updated / profile.updated_per_s
    calls = work.calls * profile.seconds_per_call
    if profile.kind != "cpu":
        calls = max(0.0, calls - compute - memory - update)
    took = dict(_exchanges(work, profile, link_bytes_per_s))
    free = 1.0 if link_bytes_per_s or profile.exchange is None else profile.exchange.overlap
    busy = compute + memory + calls
    hidden = free * _hidden(took, busy, busy * _BACKWARD * reducing / accumulation, update)
    return Estimate(compute, memory, update, calls, sum(took.values()), hidden)


def _hidden(took: Mapping[str, float], busy: float, backward: float, update: float) -> float:
    """Seconds of exchanges, by purpose, that find something to go on behind."""
    reductions = min(took.get("reduce", 0.0), backward)
    gathers = min(took.get("gather", 0.0), busy - reductions)
    return reductions + gathers + min(took.get("publish", 0.0), update)


def _pace(profile: Profile, dtype: str) -> float:
    if dtype not in profile.flops_per_s:
        raise DsxError(
            f"matrix products in {dtype} were not measured",
            where="the profile of this machine",
            expected=", ".join(profile.flops_per_s),
            remedy="the time of a run that makes them cannot be estimated",
        )
    return profile.flops_per_s[dtype]


def _exchanges(work: Work, profile: Profile, link: float | None) -> Iterator[tuple[str, float]]:
    """Seconds of each purpose's collectives."""
    measured = profile.exchange
    if measured is None and link is None and any(work.sent.values()):
        raise DsxError(
            "the profile of this machine knows no exchange between ranks",
            found="it was measured with a single rank",
            remedy="run `dsx doctor --profile --nproc 2`, or say what the link carries with --link",
        )
    latency = measured.seconds_per_message if measured else 0.0
    for purpose, messages in work.messages.items():
        rate = link
        if rate is None and measured is not None:
            rate = measured.reduced_per_s if purpose == "reduce" else measured.gathered_per_s
        yield purpose, messages * latency + (work.sent.get(purpose, 0) / rate if rate else 0.0)
