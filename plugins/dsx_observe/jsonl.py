"""`jsonl`: the numbers of every update, one JSON object to a line, in `metrics.jsonl` of the run's folder.

Every line has `kind` and `step`, the updates made so far:

    run         a process begins, with `step` updates behind it: name, planned steps, parameters, world, samples, tokens
    update      loss, norm, lr by group, scale, skipped, skips, tokens_per_s, seconds, memory, world
    evaluation  loss, samples, seconds

Numbers that are not finite are the texts "nan", "inf" and "-inf". Losses, norms and rates are those of all ranks;
seconds, tokens_per_s and memory (peak bytes) are as rank 0, the one that writes, sees them. A resumed run appends, so
later lines win: a `run` line at step s takes back what stands above it of later steps.
"""

from __future__ import annotations

import errno
import json
import math
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from attrs import asdict

from dsx.contracts import Evaluation, Observer, Report, RunInfo
from dsx.plugin import Context, Descriptor, Fill, Part, hook
from dsx_observe.measure import Stopwatch, memory
from dsx_observe.place import METRICS, Place, writing

_LONGEST_LINE = 1 << 16

descriptor = Descriptor(
    name="jsonl",
    section="observe",
    contract=1,
    options=Place,
    fills={"observers": Fill()},
    summary=f"the numbers of every update, as lines of JSON in {METRICS}",
)


@hook
def dsx_observe(options: Place) -> Iterable[Part]:
    def build(ctx: Context) -> Observer:
        return Observer() if ctx.plan.rank else Writer(options.path, ctx.plan.world)

    return [Part("observers", build)]


class Writer(Observer):
    """Appends to the file; each line is with the system when `report` returns, so a kill loses none that is whole."""

    def __init__(self, folder: Path | None, world: int) -> None:
        self._world = world
        self._info: RunInfo | None = None
        self._watch: Stopwatch | None = None
        self._begun = False
        self._path, self._file = Path(), None if folder is None else self._open(folder)

    def start(self, info: RunInfo) -> None:
        if self._file is None and info.folder is not None:
            self._file = self._open(info.folder)
        self._info, self._watch, self._begun = info, Stopwatch(), False

    def report(self, report: Report) -> None:
        if self._file is None or report.loss is None:
            return
        self._begin(report.step - report.stepped)
        seconds = self._lap()
        self._write(
            kind="update",
            step=report.step,
            loss=report.loss,
            norm=report.norm,
            lr=report.lr,
            scale=report.scale,
            skipped=report.skipped,
            skips=report.skips,
            tokens_per_s=self._info.samples * self._info.tokens / seconds if self._info and seconds else None,
            seconds=seconds,
            memory=memory(),
            world=self._world,
        )

    def evaluated(self, evaluation: Evaluation) -> None:
        if self._file is None:
            return
        if self._watch is not None:
            self._watch.pause(evaluation.seconds)
        self._begin(evaluation.step)
        self._write(kind="evaluation", **asdict(evaluation))

    def finish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _lap(self) -> float | None:
        """Seconds since the last update; None at the first of a script that does not say when it starts."""
        if self._watch is None:
            self._watch = Stopwatch()
            return None
        return self._watch.lap()

    def _begin(self, step: int) -> None:
        """Say, before the first line of this process, how many updates it found done."""
        if self._begun:
            return
        self._begun = True
        info: Mapping[str, Any] = {} if self._info is None else asdict(self._info)
        known = {("planned" if key == "steps" else key): value for key, value in info.items() if key != "folder"}
        self._write(kind="run", step=step, **{"world": self._world, **known})

    def _open(self, folder: Path) -> IO[bytes]:
        self._path = folder / METRICS
        with writing(self._path, "jsonl"):
            folder.mkdir(parents=True, exist_ok=True)
            _mend(self._path)
            file = self._path.open("ab", buffering=0)
        weakref.finalize(self, file.close)  # for scripts that do not close the engine
        return file

    def _write(self, **record: Any) -> None:
        assert self._file is not None
        line = json.dumps(_plain(record), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with writing(self._path, "jsonl"):
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _plain(value: Any) -> Any:
    """JSON has no word for NaN and infinity: their names."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _mend(path: Path) -> None:
    """Cut off the line in which an earlier process was killed, so that the next one begins on its own."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        begin = file.seek(max(0, size - _LONGEST_LINE))
        whole = begin + file.read(_LONGEST_LINE).rfind(b"\n") + 1
        if whole < size:
            file.truncate(whole)
