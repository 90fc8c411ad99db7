"""The table above the curves: what each run comes to."""

from __future__ import annotations

import math
from statistics import median

from dsx_observe.report.curves import smooth
from dsx_observe.report.read import Run

COLUMNS = ("updates", "loss", "held-out", "tokens/s", "time", "memory", "skipped", "ranks", "parameters")


def row(run: Run) -> tuple[str, ...]:
    """One text for each of `COLUMNS`."""
    updates = f"{run.step[-1]:,}" + (f" of {run.planned:,}" if run.planned and run.planned != run.step[-1] else "")
    rates = [rate for rate in run.rate if math.isfinite(rate)]
    peaks = [run.memory[place][-1] for place in ("device", "host") if place in run.memory]
    return (
        updates,
        _number(run.loss[-1] if not math.isfinite(run.loss[-1]) else smooth(run.loss)[-1]),
        _held_out(run),
        f"{median(rates):,.0f}" if rates else "-",
        duration(run.seconds[-1]),
        size(peaks[0]) if peaks else "-",
        f"{run.skips[-1]:,}",
        str(run.world or "-"),
        _millions(run.parameters),
    )


def duration(seconds: float) -> str:
    """The two units that tell most: "45 s", "12 min 5 s", "3 h 20 min", "2 d 4 h"."""
    for unit, name, part, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= unit:
            return f"{seconds // unit:.0f} {name} {seconds % unit // part:.0f} {small}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def size(count: float) -> str:
    """Bytes as MiB or GiB."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _held_out(run: Run) -> str:
    """The last held-out loss, and the best one if that is another."""
    if not run.evaluated:
        return "-"
    last = max(run.evaluated)
    loss = run.evaluated[last][0]
    best = min(run.evaluated, key=lambda step: (math.isnan(run.evaluated[step][0]), run.evaluated[step][0]))
    if best == last or not run.evaluated[best][0] < loss:
        return _number(loss)
    return f"{_number(loss)} (best {_number(run.evaluated[best][0])} at {best:,})"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"


def _millions(count: int | None) -> str:
    if not count:
        return "-"
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
