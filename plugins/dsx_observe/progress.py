"""`progress`: loss, tokens per second and time left, as a bar on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Annotated, TextIO

from attrs import frozen
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column

from dsx.contracts import Evaluation, Observer, Report, RunInfo
from dsx.plugin import Context, Descriptor, Fill, Part, hook, positive
from dsx_observe.measure import Stopwatch


@frozen(kw_only=True)
class Options:
    """every: updates between two lines where there is no terminal; None: about twenty lines a run."""

    every: Annotated[int, positive] | None = None


descriptor = Descriptor(
    name="progress",
    section="observe",
    contract=1,
    options=Options,
    fills={"observers": Fill()},
    summary="loss, tokens per second and time left",
)


@hook
def dsx_observe(options: Options) -> Iterable[Part]:
    def build(ctx: Context) -> Observer:
        if ctx.plan.rank != 0:
            return Observer()
        moves = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        return Bar(sys.stderr) if moves else Lines(options.every, sys.stderr)

    return [Part("observers", build)]


class Pace:
    """How far the run is and how fast it goes.

    position  updates tried, in earlier processes of a resumed run too, skipped ones among them
    streak    updates skipped in a row up to now
    """

    def __init__(self, info: RunInfo) -> None:
        self._steps, self._tokens = info.steps, info.samples * info.tokens
        self._whole, self._recent = Stopwatch(), Stopwatch()
        self._updates = self._since = 0
        self.position = self.streak = 0

    def count(self, report: Report) -> None:
        """An update was tried."""
        self._updates += 1
        self._since += 1
        self.position = report.step + report.skips
        self.streak = self.streak + 1 if report.skipped else 0

    def pause(self, seconds: float) -> None:
        """Leave out the time of an evaluation."""
        self._whole.pause(seconds)
        self._recent.pause(seconds)

    @property
    def recent(self) -> float:
        """Seconds since `rate` was asked."""
        return self._recent.seconds

    @property
    def over(self) -> bool:
        """Whether the last planned update was tried."""
        return self.position >= self._steps

    def rate(self) -> str:
        """Tokens per second since this was last asked."""
        tokens, self._since = self._since * self._tokens, 0
        return f"{tokens / self._recent.lap():,.0f} tokens/s"

    def left(self) -> str:
        """Time to the end of the run, without evaluations; as this process has gone so far."""
        if not self._updates:
            return "-:--:--"
        remaining = max(self._steps - self.position, 0)
        seconds = round(self._whole.seconds / self._updates * remaining)
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def news(self) -> bool:
        """Whether a skipped update is worth a line: the 1st, 2nd, 4th, 8th ... in a row."""
        return self.streak > 0 and self.streak & (self.streak - 1) == 0


class Lines(Observer):
    """A line every so many updates, for logs."""

    def __init__(self, every: int | None, out: TextIO) -> None:
        self._chosen, self._out = every, out
        self._every = self._steps = 0
        self._pace: Pace | None = None

    def start(self, info: RunInfo) -> None:
        self._steps, self._every = info.steps, self._chosen or max(1, info.steps // 20)
        self._pace = Pace(info)
        self._say(_headline(info))

    def report(self, report: Report) -> None:
        pace = self._pace
        if report.loss is None or pace is None:
            return
        pace.count(report)
        if pace.news():
            self._say(_skipped(report, pace.streak))
        elif pace.position % self._every == 0 or pace.over:
            skips = f"  {report.skips} skipped" if report.skips else ""
            self._say(
                f"step {report.step}/{self._steps}  loss {_number(report.loss)}  norm {_number(report.norm)}"
                f"  {pace.rate()}  {pace.left()} left{skips}"
            )

    def evaluated(self, evaluation: Evaluation) -> None:
        if self._pace is not None:
            self._pace.pause(evaluation.seconds)
        self._say(_evaluated(evaluation))

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class Bar(Observer):
    """A bar that is redrawn a few times a second, with a line above it for each evaluation and skipped update."""

    def __init__(self, out: TextIO) -> None:
        self._progress = Progress(
            BarColumn(bar_width=None, complete_style="cyan"),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            *(TextColumn(f"{{task.fields[{name}]}}", table_column=Column(no_wrap=True)) for name in _FIELDS),
            console=Console(file=out, highlight=False),
            refresh_per_second=4,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),  # else what is meant for a file would end on the terminal
        )
        self._task = self._progress.add_task("", total=None, loss="", rate="", left="", skips="")
        self._pace: Pace | None = None

    def start(self, info: RunInfo) -> None:
        self._pace = Pace(info)
        self._say(_headline(info))
        self._progress.update(self._task, total=info.steps)
        self._progress.start()

    def report(self, report: Report) -> None:
        pace = self._pace
        if report.loss is None or pace is None:
            return
        pace.count(report)
        if pace.news():
            self._say(_skipped(report, pace.streak))
        fields = {"loss": f"loss {_number(report.loss)}", "skips": f"{report.skips} skipped" if report.skips else ""}
        if pace.recent > 1 or pace.over or not self._progress.tasks[0].fields["rate"]:
            fields |= {"rate": pace.rate(), "left": f"{pace.left()} left"}
        self._progress.update(self._task, completed=pace.position, **fields)  # type: ignore[arg-type]

    def evaluated(self, evaluation: Evaluation) -> None:
        if self._pace is not None:
            self._pace.pause(evaluation.seconds)
        self._say(_evaluated(evaluation))

    def finish(self) -> None:
        self._progress.stop()

    def _say(self, text: str) -> None:
        self._progress.console.print(text, markup=False)


_FIELDS = ("loss", "rate", "left", "skips")
"""What stands beside the bar."""


def _headline(info: RunInfo) -> str:
    ranks = f"{info.world} rank{'s' if info.world > 1 else ''}"
    size = f"{info.parameters / 1e6:.2f} M parameters"
    return f"{info.name}: {size}, {info.steps} steps of {info.samples} samples, {ranks}"


def _skipped(report: Report, streak: int) -> str:
    row = f", {streak} in a row" if streak > 1 else ""
    return f"step {report.step}: update skipped{row}, the gradient is not finite (norm {_number(report.norm)})"


def _evaluated(evaluation: Evaluation) -> str:
    return f"step {evaluation.step}: held-out loss {_number(evaluation.loss)} ({evaluation.samples} samples)"


def _number(value: float | None) -> str:
    """At most ten characters, whatever a run that diverges brings."""
    if value is None:
        return "-"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"
