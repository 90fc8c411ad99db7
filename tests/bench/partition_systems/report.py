"""Tables and plots of results; a result is the JSON that `partition.py` writes."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from partition_systems.catalogue import LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Result = dict[str, Any]
Record = dict[str, Any]

_MB = 1e6
_COLUMNS: dict[str, Callable[[Record], str]] = {
    "time / DDP's": lambda r: "{1:.2f} ({0:.2f}-{2:.2f})".format(*quartiles(r["ratio"])),
    "ms": lambda r: f"{statistics.median(r['wall']) * 1e3:.0f}",
    "CPU ms": lambda r: f"{statistics.median(r['cpu']) * 1e3:.0f}",
    "held MB": lambda r: f"{r['held'] / _MB:.0f}",
    "steady MB": lambda r: f"{statistics.median(r['rss']) / _MB:.0f}",
    "peak MB": lambda r: f"{max(r['peak']) / _MB:.0f}",
    "start MB": lambda r: f"{r['start_peak'] / _MB:.0f}",
    "sent MB": lambda r: "not measured" if r["sent"][0] is None else f"{statistics.median(r['sent']) / _MB:.1f}",
    "first step s": lambda r: f"{r['first_s']:.1f}",
    "loss apart": lambda r: f"{r['spread']:.1g}",
}
_COLOURS = {"ddp": "#767676", "zero": "#767676", "fsdp2": "#b8860b", "deepspeed": "#8c564b", "dsx": "#1f5fa8"}


def quartiles(numbers: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median, the upper quartile."""
    if len(numbers) == 1:
        return (numbers[0],) * 3
    low, middle, high = statistics.quantiles(numbers, n=4)
    return low, middle, high


def title(result: Result) -> str:
    """What was measured, in a line."""
    case = result["case"]
    way = f", {result['link']} Mbit/s" if result["link"] else ", sockets" if result["sockets"] else ""
    way += f", {result['latency']:g} ms later" if result["latency"] else ""
    return f"{case['size']}, {case['dtype']}, {case['nproc']} ranks, accumulation {case['accumulation']}{way}"


def table(result: Result) -> str:
    """A Markdown table, and below it what failed."""
    lines = [f"{title(result)}, {result['rounds']} rounds", ""]
    lines += [" | ".join(["| system", *_COLUMNS]) + " |", "| --- " * (len(_COLUMNS) + 1) + "|"]
    for name, record in _measured(result).items():
        lines.append(" | ".join([f"| {LABELS[name]}", *(column(record) for column in _COLUMNS.values())]) + " |")
    for name, record in result["systems"].items():
        if "failed" in record:
            lines += ["", f"{LABELS[name]} failed: {record['failed']}"]
    return "\n".join(lines)


def _measured(result: Result) -> dict[str, Record]:
    return {name: record for name, record in result["systems"].items() if record.get("ratio")}


def plots(results: Sequence[Result], folder: Path) -> list[Path]:
    """One SVG for each question, with a panel for each result; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = {
        "partition_time.svg": ("time of a step / DDP's", _time),
        "partition_memory.svg": ("MB of a rank above imports: held, resident, peak", _memory),
        "partition_bytes.svg": ("MB sent by a rank in a step", _bytes),
    }
    return [_figure(results, draw, label, folder / file) for file, (label, draw) in questions.items()]


def _figure(results: Sequence[Result], draw: Callable[[Axes, dict[str, Record]], None], label: str, file: Path) -> Path:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "dsx", "svg.fonttype": "none", "font.size": 9}
    from matplotlib import pyplot

    most = max(len(_measured(result)) for result in results)
    size = (1.5 + 3.6 * len(results), 1.1 + 0.28 * most)
    figure, row = pyplot.subplots(1, len(results), figsize=size, squeeze=False, layout="constrained")
    for axes, result in zip(row[0], results, strict=True):
        records = _measured(result)
        draw(axes, records)
        axes.set_yticks(range(len(records)), [LABELS[name] for name in records])
        axes.set(title=textwrap.fill(title(result), 24), xlabel=label)
        axes.invert_yaxis()
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
    return file


def _time(axes: Axes, records: dict[str, Record]) -> None:
    for place, (name, record) in enumerate(records.items()):
        low, middle, high = quartiles(record["ratio"])
        axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", color=_colour(name), capsize=3)
    axes.axvline(1.0, color="#cccccc", zorder=0)


def _memory(axes: Axes, records: dict[str, Record]) -> None:
    """What is held as a bar, what is resident between steps and at most behind it, in lighter ones."""
    for place, (name, record) in enumerate(records.items()):
        axes.barh(place, max(record["peak"]) / _MB, color=_colour(name), alpha=0.25)
        axes.barh(place, statistics.median(record["rss"]) / _MB, color=_colour(name), alpha=0.35)
        axes.barh(place, record["held"] / _MB, color=_colour(name))


def _bytes(axes: Axes, records: dict[str, Record]) -> None:
    for place, (name, record) in enumerate(records.items()):
        if record["sent"][0] is not None:
            axes.barh(place, statistics.median(record["sent"]) / _MB, color=_colour(name))


def _colour(name: str) -> str:
    return next(colour for start, colour in _COLOURS.items() if name.startswith(start))
