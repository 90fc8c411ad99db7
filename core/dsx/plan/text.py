"""A forecast as text, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from dsx.plan.forecast import Forecast
from dsx.plan.rehearsal import ACTIVATIONS, BUFFER, Bytes, Rehearsal
from dsx.plan.resident import Resident
from dsx.plan.search import Fit
from dsx.plan.speed import Estimate

_LAST = (BUFFER, ACTIVATIONS)


def size(count: float) -> str:
    """Bytes for people, in powers of ten."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * scale:
            return f"{count / scale:.3g} {unit}" if count < 999.5 * scale else f"{count / scale:.0f} {unit}"
    return f"{count:.0f} B"


def lines(name: str, found: Forecast, resident: Resident, time: Estimate | str) -> Iterator[str]:
    """A forecast for people.

    name  of the run
    time  of an update, or why it is not known
    """
    rehearsal = found.rehearsal
    batch = f"{rehearsal.world} rank(s), {rehearsal.accumulation} micro-batch(es) an update"
    yield f"{name}: {found.parameters:,} parameters, {batch}"
    yield ""
    yield from _memory(rehearsal)
    yield ""
    yield f"a rank's process   about {size(resident.total(rehearsal))} above its imports, at the worst instant"
    for purpose, count in rehearsal.work.sent.items():
        if count:
            yield f"sent for {purpose:9} {size(count)} an update, in {rehearsal.work.messages[purpose]} messages"
    for dtype, count in rehearsal.work.flops.items():
        yield f"arithmetic         {count / 1e9:,.1f} GFLOP an update in {dtype}"
    yield from _time(time)
    yield from (f"note               {note}" for note in found.notes)


def _memory(found: Rehearsal) -> Iterator[str]:
    between = {**found.states, **found.buffers}
    yield f"{'memory of a rank':28}{'between updates':>16}{'at the worst instant':>22}"
    for key in sorted({*between, *found.peak}, key=lambda key: (key[0], key[1] in _LAST, key)):
        place, name = key
        yield f"  {name:16}{place:10}{size(between.get(key, 0)):>16}{size(found.peak.get(key, 0)):>22}"
    for place in sorted({place for place, _ in found.peak}):
        rests = sum(count for (where, _), count in between.items() if where == place)
        yield f"  {'all':16}{place:10}{size(rests):>16}{size(found.on(place)):>22}"


def _time(time: Estimate | str) -> Iterator[str]:
    if isinstance(time, str):
        yield f"time               not estimated: {time}"
        return
    exposed = time.exchange - time.hidden
    parts = {"products": time.compute, "memory": time.memory, "update": time.update, "calls": time.calls}
    words = ", ".join(f"{name} {seconds:.3g}" for name, seconds in {**parts, "exchange": exposed}.items())
    yield f"time               about {time.total:.3g} s an update: {words}"


def fitting(fits: Sequence[Fit], limit: int, resident: Resident) -> Iterator[str]:
    """What fits into `limit` bytes of a device."""
    yield f"\nfewest ranks on which a rank fits into {size(limit)}:"
    for fit in fits:
        name = fit.layout or "replicated"
        if fit.reason:
            yield f"  {name:14}not possible: {fit.reason}"
        elif fit.found is None:
            yield f"  {name:14}none up to {fit.tried}"
        else:
            sent = size(sum(fit.found.work.sent.values()))
            yield f"  {name:14}{fit.found.world:>5}   {size(resident.total(fit.found))} a rank, sends {sent} an update"


def to_json(found: Forecast, resident: Resident, time: Estimate | str, fits: Sequence[Fit]) -> dict[str, Any]:
    """All of it, in bytes and seconds."""
    return {
        "parameters": found.parameters,
        **_rehearsal(found.rehearsal, resident),
        "time": attrs.asdict(time) | {"total": time.total} if isinstance(time, Estimate) else None,
        "notes": [*found.notes, *([f"time is not estimated: {time}"] if isinstance(time, str) else [])],
        "fits": [
            {"layout": fit.layout, "reason": fit.reason, "tried": fit.tried}
            | ({"found": _rehearsal(fit.found, resident)} if fit.found else {"found": None})
            for fit in fits
        ],
    }


def _rehearsal(found: Rehearsal, resident: Resident) -> dict[str, Any]:
    return {
        "world": found.world,
        "accumulation": found.accumulation,
        "states": _nested(found.states),
        "buffers": _nested(found.buffers),
        "peak": _nested(found.peak),
        "process": resident.total(found),
        "work": attrs.asdict(found.work),
    }


def _nested(held: Bytes) -> Mapping[str, Mapping[str, int]]:
    """By place, then by name."""
    places: dict[str, dict[str, int]] = {}
    for (place, name), count in held.items():
        places.setdefault(place, {})[name] = count
    return places
