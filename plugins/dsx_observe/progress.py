"""`progress`: loss, tokens per second and time left, as a bar on a terminal and as plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Annotated, TextIO

from attrs import frozen
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dsx.contracts import Evaluation, Observer, Report, RunInfo
from dsx.plugin import Context, Descriptor, Fill, Part, hook, positive


@frozen(kw_only=True)
class Options:
    """every: steps between two lines where there is no terminal; None: about twenty lines a run."""

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
        return Bar(sys.stderr) if sys.stderr.isatty() else Lines(options.every, sys.stderr)

    return [Part("observers", build)]


class Pace:
    """Tokens per second since the last time it was asked, evaluations left out."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._updates = tokens, 0
        self._since, self._paused = time.perf_counter(), 0.0

    def count(self) -> None:
        self._updates += 1

    def pause(self, seconds: float) -> None:
        self._paused += seconds

    def take(self) -> float:
        """Tokens per second, and start over."""
        now = time.perf_counter()
        seconds = max(now - self._since - self._paused, 1e-9)
        rate = self._updates * self._tokens / seconds
        self._updates, self._since, self._paused = 0, now, 0.0
        return rate


class Lines(Observer):
    """A line every so many updates, for logs."""

    def __init__(self, every: int | None, out: TextIO) -> None:
        self._every, self._out = every, out
        self._steps = 0
        self._started = time.perf_counter()

    def start(self, info: RunInfo) -> None:
        self._steps = info.steps
        self._every = self._every or max(1, info.steps // 20)
        self._pace, self._started = Pace(info.samples * info.tokens), time.perf_counter()
        self._say(f"{info.name}: {_headline(info)}")

    def report(self, report: Report) -> None:
        if report.loss is None or not self._steps:
            return
        self._pace.count()
        if report.skipped:
            self._say(f"step {report.step}: skipped, the gradient is not finite (norm {report.norm})")
        elif report.step % (self._every or 1) == 0 or report.step == self._steps:
            left = (time.perf_counter() - self._started) / report.step * (self._steps - report.step)
            self._say(
                f"step {report.step}/{self._steps}  loss {report.loss:.4f}  norm {report.norm:.3f}"
                f"  {self._pace.take():,.0f} tokens/s  {left:.0f} s left"
            )

    def evaluated(self, evaluation: Evaluation) -> None:
        self._pace.pause(evaluation.seconds)
        self._say(f"step {evaluation.step}  held-out loss {evaluation.loss:.4f}  ({evaluation.samples} samples)")

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


class Bar(Observer):
    """A bar that is redrawn a few times a second, and a line for each evaluation."""

    def __init__(self, out: TextIO) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[rate]} tokens/s"),
            TimeRemainingColumn(),
            console=Console(file=out),
            refresh_per_second=4,
        )
        self._shown = 0.0

    def start(self, info: RunInfo) -> None:
        self._progress.console.print(f"{info.name}: {_headline(info)}", highlight=False)
        self._task = self._progress.add_task("training", total=info.steps, loss="-", rate="-")
        self._pace = Pace(info.samples * info.tokens)
        self._progress.start()

    def report(self, report: Report) -> None:
        if report.loss is None or not self._progress.live.is_started:
            return
        self._pace.count()
        if report.skipped:
            self._progress.console.print(f"step {report.step}: skipped, the gradient is not finite", highlight=False)
        now = time.perf_counter()
        fields = {"loss": f"{report.loss:.4f}"}
        if now - self._shown > 1:
            self._shown = now
            fields["rate"] = f"{self._pace.take():,.0f}"
        self._progress.update(self._task, completed=report.step, **fields)  # type: ignore[arg-type]

    def evaluated(self, evaluation: Evaluation) -> None:
        self._pace.pause(evaluation.seconds)
        text = f"step {evaluation.step}: held-out loss {evaluation.loss:.4f}"
        self._progress.console.print(text, highlight=False)

    def finish(self) -> None:
        self._progress.stop()


def _headline(info: RunInfo) -> str:
    ranks = f"{info.world} rank{'s' if info.world > 1 else ''}"
    return f"{info.parameters / 1e6:.2f} M parameters, {info.steps} steps of {info.samples} samples, {ranks}"
