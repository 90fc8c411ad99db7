"""From `metrics.jsonl` to the columns of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from attrs import Factory, define

from dsx.errors import DsxError
from dsx_observe.place import METRICS


@define
class Run:
    """One run; the lists of updates are equally long, NaN where an update has no such number.

    label       tells it from the other runs of a report
    step        updates made by then; a skipped update has the step of the one before
    seconds     of training by then
    rate        tokens per second
    memory      peak bytes, by place: host, device
    lr          by group; a skipped update keeps the rate before it
    skips       skipped updates by then
    evaluated   step -> (held-out loss, seconds of training by then)
    """

    label: str
    path: Path
    world: int | None = None
    parameters: int | None = None
    planned: int | None = None
    step: list[int] = Factory(list)
    seconds: list[float] = Factory(list)
    loss: list[float] = Factory(list)
    norm: list[float] = Factory(list)
    rate: list[float] = Factory(list)
    skips: list[int] = Factory(list)
    memory: dict[str, list[float]] = Factory(dict)
    lr: dict[str, list[float]] = Factory(dict)
    evaluated: dict[int, tuple[float, float]] = Factory(dict)

    def columns(self) -> Iterator[list[Any]]:
        """Every list of updates."""
        yield from (self.step, self.seconds, self.loss, self.norm, self.rate, self.skips)
        yield from self.memory.values()
        yield from self.lr.values()


def read_runs(places: Sequence[Path]) -> list[Run]:
    """The runs of these folders (or metrics files), in order, each with a label of its own.

    Raises `DsxError` for a place without metrics, and for a line that is broken; the last line may be, after a kill.
    """
    runs = [_read(place) for place in dict.fromkeys(place.absolute() for place in places)]
    names = [run.label for run in runs]
    for run in runs:
        if names.count(run.label) > 1:
            run.label = str(_short(run.path.parent))
    return runs


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _read(place: Path) -> Run:
    path = place if place.is_file() else place / METRICS
    if not path.is_file():
        raise DsxError(
            f"{_short(place)} holds no metrics of a run" if place.exists() else f"there is no {_short(place)}",
            expected=f"the folder of a run, with {METRICS} in it",
            remedy='name "jsonl" in [observe] use; `dsx run` then writes it to run.out',
        )
    run = Run(path.parent.name, path)
    for number, line in _lines(path):
        try:
            _take(run, json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DsxError(
                f"{_short(path)}:{number} is not a line of metrics",
                found=line[:80] + ("..." if len(line) > 80 else ""),
                expected="a JSON object with kind, step and the numbers of that kind",
                remedy="remove the line",
            ) from error
    if not run.step:
        raise DsxError(f"{_short(path)} has no update yet", remedy="wait for the first one")
    return run


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of each line; not of the last one if a kill left it without its end."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                yield number, line.rstrip("\n")


def _take(run: Run, record: dict[str, Any]) -> None:
    """Add one line; kinds that later versions may write are passed over."""
    kind, step = record["kind"], int(record["step"])
    if kind == "run":
        _rewind(run, step)
        run.label = record.get("name") or run.label
        run.world, run.parameters, run.planned = (record.get(key) for key in ("world", "parameters", "planned"))
    elif kind == "update":
        _update(run, step, record)
    elif kind == "evaluation":
        run.evaluated[step] = float(record["loss"]), run.seconds[-1] if run.seconds else 0.0


def _rewind(run: Run, step: int) -> None:
    """A process began at `step`: what an earlier one did beyond it was done in vain."""
    keep = sum(1 for made in run.step if made <= step) if step else 0
    for column in run.columns():
        del column[keep:]
    run.evaluated = {at: value for at, value in run.evaluated.items() if at <= step}


def _update(run: Run, step: int, record: dict[str, Any]) -> None:
    before = len(run.step)
    run.step.append(step)
    run.seconds.append((run.seconds[-1] if before else 0.0) + float(record.get("seconds") or 0.0))
    run.loss.append(float(record["loss"]))
    run.norm.append(float(record["norm"]))
    run.rate.append(float(record.get("tokens_per_s") or math.nan))
    run.skips.append(int(record["skips"]))
    _extend(run.memory, record.get("memory") or {}, before)
    _extend(run.lr, record["lr"], before)


def _extend(columns: dict[str, list[float]], values: dict[str, Any], before: int) -> None:
    """One value more in every column: NaN before a name is first met, the value before where it is left out."""
    for name in values:
        if name not in columns:
            columns[name] = [math.nan] * before
    for name, column in columns.items():
        column.append(float(values[name]) if name in values else column[-1] if column else math.nan)
