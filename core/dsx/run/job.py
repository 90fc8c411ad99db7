"""One rank's part of `dsx run`: everything from the manifest to the saved weights."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from attrs import define, frozen

from dsx.contracts import Evaluation, Report, RunInfo
from dsx.engine import Engine
from dsx.errors import DsxError, Halted
from dsx.heed import asked, listen
from dsx.launch.distributed import Ranks, join, leave
from dsx.launch.stop import install_handlers
from dsx.launch.worker import begun_before, note_begun
from dsx.manifest import Manifest
from dsx.manifest.batch import Batch
from dsx.run.data import Batches, tokens_of
from dsx.run.evaluate import evaluate
from dsx.run.resume import Keeper
from dsx.run.targets import make, make_model
from dsx.run.weights import save_weights
from dsx.start import prepare

WEIGHTS = "model.safetensors"


@frozen
class Summary:
    """How a run ended.

    updates  windows of samples used, skipped ones included
    before   evaluation of the untrained model, if the data has a held-out part
    after    of the trained one
    weights  the file written; None after a stop
    skips    updates skipped because a gradient was not finite
    sample   a text by the trained model, if the data can make one
    notes    what else happened
    stopped  the signal that stopped the run, or 0
    """

    updates: int
    before: float | None
    after: Evaluation | None
    weights: Path | None
    skips: int
    sample: str
    notes: tuple[str, ...] = ()
    stopped: int = 0


def run(
    manifest: str,
    overrides: Sequence[str] = (),
    overwrite: bool = False,
    resume: str | None = None,
    timeout_s: float = 600,
    elastic: bool = False,
) -> Summary:
    """Train as the manifest at this path says; entered by every rank.

    resume   "latest", the path or name of a checkpoint, "latest-or-start", or None
    elastic  ranks may start again: those that do go on from the last checkpoint since the first time, whatever
             `overwrite` and `resume` said then

    Raises `DsxError` where the manifest lacks what a run needs, its folder holds an earlier run, or nothing is there to
    resume from.
    """
    settings = Manifest.load(manifest, set=overrides)
    check(settings)
    if not elastic:
        check_folder(settings, overwrite, resume)
    cuda = torch.cuda.is_available()
    ranks = join(torch.device("cuda" if cuda else "cpu"), timeout_s)
    device = torch.device("cuda", ranks.local_rank) if cuda else torch.device("cpu")
    try:
        with install_handlers():
            return _prepared(settings, ranks, device, overwrite, resume, elastic)
    finally:
        leave(ranks)


def check(settings: Manifest) -> None:
    """Refuse what `dsx run` cannot run."""
    missing = [
        f"{key} ({words})"
        for key, words, value in (
            ("run.steps", "how many updates", settings.run.steps),
            ("model.factory", "which model", settings.model),
            ("data.source", "which data", settings.data),
            ("batch.micro or batch.global", "how many samples", settings.batch.micro or settings.batch.global_),
        )
        if value is None
    ]
    if missing:
        raise DsxError(
            f"`dsx run` needs {', '.join(missing)}", where=str(settings.path), remedy="`dsx init` writes a start"
        )


def check_folder(settings: Manifest, overwrite: bool, resume: str | None) -> None:
    """Refuse to write over an earlier run unasked."""
    if overwrite or resume:
        return
    folder = settings.run.folder
    for held, what in ((folder / WEIGHTS, "the weights"), (folder / "checkpoints" / "latest", "checkpoints")):
        if held.exists():
            raise DsxError(
                f"{folder} holds {what} of an earlier run",
                where="run.out",
                remedy="go on with --resume, choose another folder with --set run.out=..., or give --overwrite",
            )


def _prepared(
    settings: Manifest, ranks: Ranks, device: torch.device, overwrite: bool, resume: str | None, elastic: bool
) -> Summary:
    assert settings.model is not None and settings.data is not None
    batch = settings.resolve_batch(ranks.world)
    _seed(settings.run.seed)
    model = make_model(settings.model, device, settings.run.empty_init)
    source = make(settings.data, "data.source")
    engine = prepare(model, settings, device=device, overlap_publish=True)
    _seed(settings.run.seed * 1_000_003 + 1 + ranks.rank)
    listen(engine)
    try:
        training = _Training(engine, settings, source, batch, device)
        try:
            _begin(training, overwrite, resume, elastic)
            return training.run()
        finally:
            training.keeper.close()
    finally:
        engine.close()


def _begin(training: _Training, overwrite: bool, resume: str | None, elastic: bool) -> None:
    """From the start, or from a checkpoint: which one is another question for ranks that start again."""
    keeper, settings = training.keeper, training.settings
    if elastic and keeper.anybody(begun_before()):
        keeper.begin_again(training.batches, resume)
        return
    if elastic:  # else it was looked at before there was a model
        keeper.together(lambda: check_folder(settings, overwrite, resume))
    keeper.begin(training.batches, overwrite, resume)
    if elastic:
        note_begun()


@define(init=False)
class _Training:
    """A run under way on one rank."""

    engine: Engine
    settings: Manifest
    source: Any
    batches: Batches
    keeper: Keeper
    device: torch.device
    micro: int

    def __init__(self, engine: Engine, settings: Manifest, source: Any, batch: Batch, device: torch.device) -> None:
        transport = engine.program.transport
        assert batch.micro is not None
        self.engine, self.settings, self.source, self.device = engine, settings, source, device
        self.micro = batch.micro
        self.batches = Batches(
            source,
            micro=batch.micro,
            accumulation=batch.accumulation,
            rank=transport.rank,
            world=transport.world,
            seed=settings.run.seed,
            device=device,
        )
        self.keeper = Keeper(engine, settings, device)

    def run(self) -> Summary:
        settings, engine, keeper = self.settings, self.engine, self.keeper
        steps = settings.run.steps or 0
        for observer in engine.program.observers:
            observer.start(self._info(steps))
        if keeper.untrained is None:
            found = self.evaluate()
            keeper.untrained = found.loss if found else None
        after, stopped, notes = None, 0, list(keeper.notes)
        while keeper.updates < steps and not stopped:
            batches = self.batches.update(keeper.updates)
            first = next(batches, None)
            if first is None:
                notes.append(f"the data ended after {keeper.updates} of {steps} updates")
                break
            report = self.update(chain([first], batches))
            stopped = asked(report)
            keeper.save_if_due(self.batches, final=keeper.updates == steps, stopped=bool(stopped))
            if not stopped and settings.evaluate.every and keeper.updates % settings.evaluate.every == 0:
                after = self.evaluate()
        if stopped:
            return self._summary(after, None, notes, stopped)
        if after is None or after.step != engine.steps:
            after = self.evaluate()
        save_weights(engine, settings.run.folder / WEIGHTS)
        return self._summary(after, settings.run.folder / WEIGHTS, notes, 0)

    def update(self, batches: Iterable[Any]) -> Report:
        """One update, made or skipped; where training cannot go on, its state is saved first."""
        try:
            report = self.engine.train_step(batches)
        except Halted as halt:
            self.keeper.count()
            self.keeper.save(self.batches, wait=True)
            halt.remedy = f"{halt.remedy or 'change what led here'}; the state is saved: --resume goes on from it"
            raise
        self.keeper.count()
        return report

    def evaluate(self) -> Evaluation | None:
        held_out = getattr(self.source, "held_out", None)
        if held_out is None or len(held_out) == 0:
            return None
        samples = self.settings.evaluate.samples
        found = evaluate(self.engine, held_out, micro=self.micro, device=self.device, samples=samples)
        for observer in self.engine.program.observers:
            observer.evaluated(found)
        return found

    def _summary(self, after: Evaluation | None, weights: Path | None, notes: Sequence[str], stopped: int) -> Summary:
        sample = "" if stopped else self._sample()
        keeper = self.keeper
        return Summary(
            keeper.updates, keeper.untrained, after, weights, self.engine.skips, sample, tuple(notes), stopped
        )

    def _info(self, steps: int) -> RunInfo:
        settings, model = self.settings, self.engine.model
        count = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return RunInfo(
            settings.run.name,
            steps,
            count,
            self.engine.program.transport.world,
            self.batches.samples,
            tokens_of(self.batches.first()),
            settings.run.folder,
        )

    def _sample(self) -> str:
        """Entered by all ranks: under some layouts a forward needs every one of them."""
        show = getattr(self.source, "sample", None)
        if show is None:
            return ""
        self.engine.model.eval()
        with torch.no_grad(), self.engine.settled():
            return str(show(self.engine.model))


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed % (1 << 63))
