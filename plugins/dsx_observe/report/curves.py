"""From columns of any length to curves of as many points as a screen has pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from attrs import asdict, frozen

from dsx_observe.report.read import Run

POINTS = 700
"""Points of a curve at most; a chart on a wide screen has fewer pixels."""


@frozen
class Curve:
    """One line of a chart, with as many values as its run has points; None where there is none.

    name       tells it from others of the same run, e.g. a hyperparameter group
    line       what is drawn as a line
    low, high  least and greatest single update of each point, where the line is a mean of several
    """

    name: str
    line: list[float | None]
    low: list[float | None] | None = None
    high: list[float | None] | None = None


@frozen
class Chart:
    """One quantity.

    unit    how its values are written: number, rate, bytes, count
    zero    whether its axis begins at 0
    curves  of a run
    """

    key: str
    title: str
    note: str
    unit: str
    zero: bool
    curves: Callable[[Run], list[Curve]]


def _noisy(values: Sequence[float]) -> list[Curve]:
    """A smoothed line, and the range of what it smooths."""
    cuts = _cuts(len(values))
    parts = [[value for value in values[start:stop] if math.isfinite(value)] for start, stop in cuts]
    low = [_short(min(part, default=None)) for part in parts]
    high = [_short(max(part, default=None)) for part in parts]
    return [Curve("", _last(smooth(values), cuts), low, high)]


def _plain(columns: Mapping[str, Sequence[float]]) -> list[Curve]:
    return [Curve(name, _last(values, _cuts(len(values)))) for name, values in columns.items()]


CHARTS = (
    Chart("loss", "Loss", "training, smoothed; dots are held-out", "number", False, lambda run: _noisy(run.loss)),
    Chart("norm", "Gradient norm", "before clipping, smoothed", "number", True, lambda run: _noisy(run.norm)),
    Chart("lr", "Learning rate", "", "number", True, lambda run: _plain(run.lr)),
    Chart("rate", "Tokens per second", "all ranks, smoothed", "rate", True, lambda run: _noisy(run.rate)),
    Chart("memory", "Memory", "peak of rank 0", "bytes", True, lambda run: _plain(run.memory)),
    Chart("skips", "Skipped updates", "gradient not finite", "count", True, lambda run: _plain({"": run.skips})),
)


def smooth(values: Sequence[float]) -> list[float]:
    """The mean around each value, over a fiftieth of all in total: fewer near the first one, where curves are steep,
    and only those before near the last. NaN and infinity are left out, and give NaN in their own place."""
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    reach = len(values) // 100
    means = []
    for at, value in enumerate(values):
        start, stop = at - min(at, reach), min(len(values), at + min(at, reach) + 1)
        count = counts[stop] - counts[start]
        means.append((sums[stop] - sums[start]) / count if math.isfinite(value) and count else math.nan)
    return means


def points(run: Run) -> dict[str, Any]:
    """What a page shows of a run: steps and seconds of its points, and the curves of each chart."""
    cuts = _cuts(len(run.step))
    return {
        "label": run.label,
        "step": [run.step[stop - 1] for _, stop in cuts],
        "seconds": _last(run.seconds, cuts),
        "charts": {chart.key: [asdict(curve) for curve in chart.curves(run)] for chart in CHARTS},
        "heldOut": [
            {"step": step, "seconds": _short(seconds), "loss": _short(loss)}
            for step, (loss, seconds) in sorted(run.evaluated.items())
        ],
    }


def _cuts(count: int) -> list[tuple[int, int]]:
    """`count` updates in at most `POINTS` stretches of one or more."""
    pieces = min(count, POINTS)
    edges = [count * number // pieces for number in range(pieces + 1)] if pieces else [0]
    return list(pairwise(edges))


def _last(values: Sequence[float], cuts: Sequence[tuple[int, int]]) -> list[float | None]:
    """The last finite value of each stretch."""
    return [
        next((_short(values[at]) for at in range(stop - 1, start - 1, -1) if math.isfinite(values[at])), None)
        for start, stop in cuts
    ]


def _short(value: float | None) -> float | None:
    """Five digits are more than a screen shows."""
    return float(f"{value:.5g}") if value is not None and math.isfinite(value) else None
