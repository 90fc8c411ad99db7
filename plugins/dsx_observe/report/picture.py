"""The same curves as a PNG, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dsx.errors import DsxError
from dsx_observe.report.curves import CHARTS, Chart, points
from dsx_observe.report.read import Run
from dsx_observe.report.summary import size


def require() -> None:
    """Raises `DsxError` where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise DsxError(
            "--png needs the package matplotlib, which is not installed",
            remedy="pip install 'dsx-engine[observe]', or leave --png out: the page needs nothing",
        )


def picture(runs: Sequence[Run], path: Path) -> None:
    """Write the charts of these runs to a PNG file, 1800 x 1350 pixels."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 9), dpi=150, layout="constrained")
    shown = [points(run) for run in runs]
    for axes, chart in zip(figure.subplots(3, 2).flat, CHARTS, strict=True):
        _draw(axes, chart, shown)
    if len(runs) > 1:
        figure.axes[0].legend(frameon=False)
    else:
        figure.suptitle(runs[0].label)
    figure.savefig(path)


def _draw(axes: Any, chart: Chart, shown: Sequence[dict[str, Any]]) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    for number, run in enumerate(shown):
        color = f"C{number % 10}"
        for curve, dashes in zip(run["charts"][chart.key], ("-", "--", ":", "-."), strict=False):
            line = _floats(curve["line"])
            label = run["label"] if dashes == "-" else None
            axes.plot(run["step"], line, dashes, color=color, linewidth=1.5, label=label)
            if curve["low"] is not None:
                low, high = _floats(curve["low"]), _floats(curve["high"])
                axes.fill_between(run["step"], low, high, color=color, alpha=0.15, linewidth=0)
        if chart.key == "loss":
            dots = run["heldOut"]
            axes.plot([dot["step"] for dot in dots], _floats([dot["loss"] for dot in dots]), "o", color=color)
    axes.set_title(chart.title + (f"  ({chart.note})" if chart.note else ""), fontsize=10, loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.zero:
        axes.set_ylim(bottom=0, top=_top(chart, shown))
    if chart.unit == "bytes":
        axes.yaxis.set_major_locator(MultipleLocator(2.0 ** math.ceil(math.log2(axes.get_ylim()[1] / 6))))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    if chart.unit == "count":
        axes.set_ylim(top=max(1.0, axes.get_ylim()[1]))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _top(chart: Chart, shown: Sequence[dict[str, Any]]) -> float | None:
    """Single spikes of a noisy quantity may leave the picture, so that one of them does not flatten all else."""
    curves = [curve for run in shown for curve in run["charts"][chart.key]]
    highs: list[float] = sorted(value for curve in curves for value in curve["high"] or () if value is not None)
    if not highs:
        return None
    lines: list[float] = [value for curve in curves for value in curve["line"] if value is not None]
    return 1.1 * max(highs[int(0.995 * (len(highs) - 1))], *lines)


def _floats(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]
