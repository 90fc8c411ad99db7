"""Tables and plots of what `attention.py --json` wrote.

    python tests/bench/attention_report.py FILE... [--plots FOLDER]

Prints a table for each number of threads, and what follows from it: how time and memory grow, and how long a sequence
may be. "Times" says how many times as fast as `dense` in the same dtype a way is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attention import LONGEST

Key = tuple[str, str, int]
Rows = Mapping[Key, Mapping[str, Any]]
"""By dtype, way and length."""


def read(files: Sequence[Path]) -> dict[int, Rows]:
    """The last row of each kind, by threads."""
    found: dict[int, dict[Key, Mapping[str, Any]]] = {}
    for file in files:
        for row in json.loads(file.read_text()):
            found.setdefault(row["threads"], {})[row["dtype"], row["way"], row["length"]] = row
    return dict(sorted(found.items()))


def table(rows: Rows) -> str:
    lines = ["| dtype | tokens | attention | ms | MiB added | times |", "|---|---|---|---|---|---|"]
    ways = list(LONGEST)
    for dtype, way, length in sorted(rows, key=lambda key: (key[0] != "float32", key[2], ways.index(key[1]))):
        row, dense = rows[dtype, way, length], rows.get((dtype, "dense", length))
        size = "" if row["bytes"] is None else f"{row['bytes'] / 2**20:.0f}"
        times = "" if dense is None or way == "flex" else f"{dense['seconds'] / row['seconds']:.2f}"
        lines.append(f"| {dtype} | {length} | {way} | {row['seconds'] * 1e3:.1f} | {size} | {times} |")
    return "\n".join(lines)


def conclusions(rows: Rows) -> Iterator[str]:
    """What the numbers say of `sparse`."""
    for dtype in ("float32", "bfloat16"):
        for what in ("seconds", "bytes"):
            first, last = (_value(rows, dtype, "sparse", length, what) for length in (4096, 65536))
            if first and last:
                yield f"{dtype}: {what} of 65536 tokens are {last / first:.1f} times those of 4096, 16 being linear"
        for way, length, what in (("dense", 8192, "seconds"), ("eager", 4096, "bytes")):
            limit = _value(rows, dtype, way, length, what)
            if limit and (most := _longest(rows, dtype, limit, what)):
                yield f"{dtype}: in the {what} of {way} at {length}, {most / length:.1f} times as long a sequence"
        for length in (1024, 2048, 4096, 8192, 16384):
            ours, theirs = (_value(rows, dtype, way, length, "bytes") for way in ("sparse", "dense"))
            if ours and theirs:
                yield f"{dtype}: at {length} it adds {ours / theirs:.2f} of the bytes that `dense` adds"


def _value(rows: Rows, dtype: str, way: str, length: int, what: str) -> float | None:
    row = rows.get((dtype, way, length))
    return None if row is None else row[what]


def _longest(rows: Rows, dtype: str, limit: float, what: str) -> int | None:
    """The longest measured sequence that keeps within a limit."""
    lengths = [key[2] for key in rows if key[:2] == (dtype, "sparse")]
    return max((n for n in lengths if (_value(rows, dtype, "sparse", n, what) or limit + 1) <= limit), default=None)


def plot(rows: Rows, folder: Path) -> Iterator[Path]:
    """attention_time.svg and attention_memory.svg, one panel a dtype."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "dsx"  # the same file again
    dtypes = [dtype for dtype in ("float32", "bfloat16") if any(key[0] == dtype for key in rows)]
    for name, what, unit, scale in (("time", "seconds", "ms", 1e3), ("memory", "bytes", "MiB", 2**-20)):
        figure, panels = pyplot.subplots(1, len(dtypes), figsize=(5 * len(dtypes), 4), squeeze=False)
        for panel, dtype in zip(panels[0], dtypes, strict=True):
            for way in LONGEST:
                mine = sorted((key[2], row[what]) for key, row in rows.items() if key[:2] == (dtype, way) and row[what])
                if mine:
                    label = f"{way} (forward alone)" if way == "flex" else way
                    panel.loglog([n for n, _ in mine], [v * scale for _, v in mine], marker="o", label=label, base=2)
            panel.set(title=dtype, xlabel="tokens", ylabel=f"{name}, {unit}")
            panel.legend()
        figure.tight_layout()
        path = folder / f"attention_{name}.svg"
        figure.savefig(path, metadata={"Date": None})
        yield path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--plots", type=Path)
    arguments = parser.parse_args()
    found = read(arguments.files)
    for threads, rows in found.items():
        print(f"{threads} thread(s)\n\n{table(rows)}\n")
        print("\n".join(conclusions(rows)) + "\n")
    if arguments.plots:
        print("\n".join(map(str, plot(next(iter(found.values())), arguments.plots))))


if __name__ == "__main__":
    main()
