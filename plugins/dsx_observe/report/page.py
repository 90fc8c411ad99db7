"""One HTML page that needs nothing else: data, style and script are in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import escape
from importlib.resources import files

from attrs import asdict

from dsx_observe.report.curves import CHARTS, points
from dsx_observe.report.read import Run
from dsx_observe.report.summary import COLUMNS, row

COLORS = 8
"""Colours of the style; the ninth run has the first one's again."""


def page(runs: Sequence[Run]) -> str:
    """The page of these runs."""
    updates = sum(run.step[-1] for run in runs)
    parts = {
        "title": escape(", ".join(run.label for run in runs[:3]) + (" ..." if len(runs) > 3 else "")),
        "lead": f"{len(runs)} run{'s' if len(runs) > 1 else ''}, {updates:,} updates",
        "head": "".join(f'<th scope="col">{name}</th>' for name in ("run", *COLUMNS)),
        "rows": "\n".join(map(_row, range(len(runs)), runs)),
        "data": _json({"charts": [_chart(number) for number in range(len(CHARTS))], "runs": list(map(points, runs))}),
        "style": _text("page.css"),
        "script": _text("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _text("page.html"))


def _row(number: int, run: Run) -> str:
    name = f'<th scope="row"><i class="c{number % COLORS}"></i>{escape(run.label)}</th>'
    cells = (f'<td data-name="{label}">{escape(text)}</td>' for label, text in zip(COLUMNS, row(run), strict=True))
    return f"<tr>{name}{''.join(cells)}</tr>"


def _chart(number: int) -> dict[str, object]:
    return asdict(CHARTS[number], filter=lambda field, _: field.name != "curves")


def _json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _text(name: str) -> str:
    return files("dsx_observe.report").joinpath(name).read_text("utf-8")
