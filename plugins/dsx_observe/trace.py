"""`trace`: torch's profiler over a few updates, one Chrome trace for each rank, `trace/rank0.json.gz` and so on.

Open them in https://ui.perfetto.dev or chrome://tracing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

from attrs import frozen
from torch.profiler import profile, schedule

from dsx.contracts import Observer, Report, RunInfo
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Part, hook, positive
from dsx_observe.place import Place, writing


@frozen(kw_only=True)
class Options(Place):
    """Which updates, and in what detail.

    first   the first update traced, counted from the start of this process
    steps   how many are traced
    shapes  note the shapes of tensors, at some cost
    stacks  note where in the source calls come from, at more cost
    """

    first: Annotated[int, positive] = 10
    steps: Annotated[int, positive] = 3
    shapes: bool = False
    stacks: bool = False


descriptor = Descriptor(
    name="trace",
    section="observe",
    contract=1,
    options=Options,
    fills={"observers": Fill()},
    summary="a profiler trace of a few updates on every rank, for Perfetto",
)


@hook
def dsx_observe(options: Options) -> Iterable[Part]:
    def build(ctx: Context) -> Observer:
        return Tracer(options, ctx.plan.rank)

    return [Part("observers", build)]


class Tracer(Observer):
    """Counts updates; profiles the chosen ones, and the one before them without keeping it, since it pays for the
    profiler's own start."""

    def __init__(self, options: Options, rank: int) -> None:
        self._options, self._name = options, f"rank{rank}.json.gz"
        self._warmup = min(1, options.first - 1)
        self._updates = 0
        self._path: Path | None = None
        self._profile: profile | None = None
        if options.path is not None:
            self._arm(options.path)

    def start(self, info: RunInfo) -> None:
        if self._path is not None or info.folder is None:
            return
        if self._options.first > info.steps:
            raise DsxError(
                f"'trace' is to begin at update {self._options.first}, and the run has {info.steps}",
                where="observe.trace.first",
                remedy=f"choose at most {info.steps}, or take it out of `use`",
            )
        self._arm(info.folder)

    def report(self, report: Report) -> None:
        if self._path is None or report.loss is None:
            return
        self._updates += 1
        if self._updates == self._options.first - 1 + self._options.steps:
            self.finish()
        elif self._profile is not None:
            self._profile.step()
        else:
            self._begin()

    def finish(self) -> None:
        """Write what was recorded, though the run may end before all chosen updates."""
        if self._profile is not None:
            self._profile.stop()
        self._profile = self._path = None

    def _arm(self, folder: Path) -> None:
        self._path = folder / "trace" / self._name
        with writing(self._path, "trace"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._begin()

    def _begin(self) -> None:
        if self._updates != self._options.first - 1 - self._warmup:
            return
        self._profile = profile(
            schedule=schedule(wait=0, warmup=self._warmup, active=self._options.steps, repeat=1),
            on_trace_ready=self._save,
            record_shapes=self._options.shapes,
            with_stack=self._options.stacks,
        )
        self._profile.start()

    def _save(self, recorded: profile) -> None:
        assert self._path is not None
        with writing(self._path, "trace"):
            recorded.export_chrome_trace(str(self._path))
