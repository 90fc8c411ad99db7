"""`tensorboard`: the same numbers for TensorBoard, in the folder `tensorboard` of the run's own."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dsx.contracts import Evaluation, Observer, Report, RunInfo
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Part, hook
from dsx_observe.measure import Stopwatch, memory
from dsx_observe.place import Place, writing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_FLUSH_S = 10

descriptor = Descriptor(
    name="tensorboard",
    section="observe",
    contract=1,
    options=Place,
    fills={"observers": Fill()},
    summary="the numbers of every update, for TensorBoard",
)


@hook
def dsx_observe(options: Place) -> Iterable[Part]:
    def build(ctx: Context) -> Observer:
        # On every rank, though one writes: a rank that ends alone leaves the others waiting.
        if find_spec("tensorboard") is None:
            raise DsxError(
                "'tensorboard' needs the package tensorboard, which is not installed",
                where="[observe] use",
                remedy="pip install 'dsx-engine[observe]', or take it out of `use`",
            )
        return Observer() if ctx.plan.rank else Scalars(options.path)

    return [Part("observers", build)]


class Scalars(Observer):
    """Writes event files. A resumed run hides what an earlier one wrote of the steps that it repeats."""

    def __init__(self, folder: Path | None) -> None:
        import torch.utils.tensorboard  # noqa: F401 -- here, so that training imports nothing

        self._folder = None if folder is None else self._make(folder)
        self._writer: SummaryWriter | None = None
        self._watch: Stopwatch | None = None
        self._tokens = 0

    def start(self, info: RunInfo) -> None:
        if self._folder is None and info.folder is not None:
            self._folder = self._make(info.folder)
        self._tokens, self._watch = info.samples * info.tokens, Stopwatch()

    def report(self, report: Report) -> None:
        if self._folder is None or report.loss is None:
            return
        writer = self._at(report.step - report.stepped)
        values = {"loss/training": report.loss, "gradient/norm": report.norm, "gradient/scale": report.scale}
        values |= {"gradient/skips": report.skips} | {f"lr/{group}": rate for group, rate in report.lr.items()}
        values |= {f"memory/{place}": held for place, held in memory().items()}
        if self._watch is not None:
            values["speed/tokens_per_s"] = self._tokens / self._watch.lap()
        for name, value in values.items():
            writer.add_scalar(name, value, report.step)

    def evaluated(self, evaluation: Evaluation) -> None:
        if self._folder is None:
            return
        if self._watch is not None:
            self._watch.pause(evaluation.seconds)
        self._at(evaluation.step).add_scalar("loss/held_out", evaluation.loss, evaluation.step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _at(self, step: int) -> SummaryWriter:
        """The writer, which is told by the first number how many updates were made before."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            purge = step + 1 if step else 0
            self._writer = SummaryWriter(str(self._folder), purge_step=purge, flush_secs=_FLUSH_S)
            weakref.finalize(self, self._writer.close)  # for scripts that do not close the engine
        return self._writer

    def _make(self, folder: Path) -> Path:
        path = folder / "tensorboard"
        with writing(path, "tensorboard"):
            path.mkdir(parents=True, exist_ok=True)
        return path
