"""The checkpoints of `dsx run`: when they are written, and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dsx.checkpoint.info import read_info
from dsx.checkpoint.series import LATEST, Series
from dsx.engine import Engine
from dsx.errors import CheckpointError, DsxError
from dsx.manifest import Manifest
from dsx.run.data import Batches
from dsx.run.state import decode, encode
from dsx.together import together

if TYPE_CHECKING:
    from dsx.checkpoint.background import Background


T = TypeVar("T")

LATEST_OR_START = "latest-or-start"
"""From the last checkpoint, if there is one."""


class Keeper:
    """Saves and resumes one run.

    updates    windows of samples used so far, skipped ones included
    untrained  held-out loss before the first update, if it was measured
    notes      what a resumed run does otherwise than its checkpoint
    """

    def __init__(self, engine: Engine, settings: Manifest, device: torch.device) -> None:
        self._engine, self._settings, self._device = engine, settings, device
        self._transport = engine.program.transport
        self._writes = self._transport.rank == 0
        self.series = Series(settings.run.folder / "checkpoints", settings.checkpoint.keep)
        self.updates = 0
        self.untrained: float | None = None
        self.notes: list[str] = []
        self._saved_at: int | None = None
        self._background: Background | None = None
        if settings.checkpoint.background:
            self._refuse_copies_of_files()

    def _refuse_copies_of_files(self) -> None:
        """A copy in memory of what was put into files, since there is no room for it, is not made unasked."""
        held = self._engine.program.store.places()
        if size := sum(count for (place, _), count in held.items() if place == "disk"):
            raise DsxError(
                "checkpoints beside the training copy all states into the host's memory first",
                where="checkpoint.background",
                found=f"{size:,} bytes of states that rest in files",
                remedy="leave checkpoint.background out, or let those states rest in memory",
            )

    def begin(self, batches: Batches, overwrite: bool, resume: str | None) -> None:
        """Make the run's folder, and continue from a checkpoint if asked to."""
        clear = overwrite and not resume
        given = resume if resume not in (LATEST, LATEST_OR_START) else None
        self.together(lambda: self._make_folder(clear, given))
        self._go_on(batches, resume)

    def begin_again(self, batches: Batches, resume: str | None) -> None:
        """Continue from the last checkpoint that was written since the first `begin`, or as that did."""
        self.together(self._sweep)
        given = self.together(self.series.origin)
        self._go_on(batches, resume if given else LATEST_OR_START)

    def together(self, work: Callable[[], T]) -> T:
        """Do it on every rank, and fail on all if it fails on one."""
        return together(self._transport, self._device, work)

    def anybody(self, wish: bool) -> bool:
        """Whether any rank says so."""
        count = torch.tensor([float(wish)], device=self._device)
        self._transport.all_reduce(count, "sum", channel="admin", purpose="admin").wait()
        return bool(count.item() > 0)

    def _go_on(self, batches: Batches, resume: str | None) -> None:
        if resume == LATEST_OR_START:
            resume = LATEST if self.together(self.series.exists) else None
        if resume is not None:
            self._resume(batches, resume)

    def count(self) -> None:
        """An update was made, or skipped."""
        self.updates += 1

    def save_if_due(self, batches: Batches, final: bool, stopped: bool) -> None:
        """Write a checkpoint every `checkpoint.every` updates, at the end of such a run, and when the run is
        stopped."""
        every = self._settings.checkpoint.every
        if stopped or (every and (final or self.updates % every == 0)):
            self.save(batches, wait=stopped or final)

    def save(self, batches: Batches, wait: bool) -> None:
        """Write a checkpoint, make it the latest, and delete the oldest.

        wait  until it is written, also where [checkpoint] says `background`
        """
        if self._saved_at != self.updates:
            self._saved_at = self.updates
            path, extra = self.series.path(self.updates), self._extra(batches)
            if self._settings.checkpoint.background:
                self._writer().save(path, extra, lambda: self._record(path))
            else:
                from dsx.checkpoint.folder import save

                save(self._engine, path, extra=extra)
                self.together(lambda: self._record(path))
        if wait and self._background is not None:
            self._background.wait()

    def close(self) -> None:
        """Wait for what is being written."""
        if self._background is not None:
            self._background.close()

    def _writer(self) -> Background:
        if self._background is None:
            from dsx.checkpoint.background import Background

            self._background = Background(self._engine)
        return self._background

    def _record(self, path: Path) -> None:
        if self._writes:
            self.series.record(path)

    def _extra(self, batches: Batches) -> dict[str, Any]:
        return {
            "updates": self.updates,
            "first": batches.index(self.updates),
            "samples": batches.samples,
            "source": encode(batches.state()),
            "untrained": self.untrained,
            "manifest": self._settings.to_dict(),
        }

    def _sweep(self) -> None:
        if self._writes:
            self.series.sweep()

    def _make_folder(self, clear: bool, origin: str | None) -> None:
        """Write there, too, from which checkpoint the run begins, if that is not its own last one."""
        if not self._writes:
            return
        try:
            self.series.folder.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"the run's folder cannot be made: {error}", where="run.out") from error
        self.series.sweep()
        if clear:
            self.series.clear()
        self.series.begin(origin)

    def _resume(self, batches: Batches, which: str) -> None:
        from dsx.checkpoint.folder import load

        path = self.series.find(which)
        info = self.together(lambda: read_info(path))
        extra = info["extra"]
        if "first" not in extra:
            raise CheckpointError(f"'{path}' was not written by `dsx run`", remedy="load it with engine.load(path)")
        self.together(lambda: self._check_batch(extra, batches))
        loaded = load(self._engine, path)
        self.notes += [f"resumed from {path}", *loaded.notes]
        self.updates, self.untrained = extra["updates"], extra["untrained"]
        self._saved_at = self.updates if self.series.path(self.updates) == path else None
        batches.resume(self.updates, extra["first"], decode(extra["source"]))

    def _check_batch(self, extra: dict[str, Any], batches: Batches) -> None:
        """The same [batch] on another world size must not change the batch without a word."""
        before, now = extra["samples"], batches.samples
        if before == now:
            return
        if extra["manifest"].get("batch") == self._settings.to_dict().get("batch"):
            raise CheckpointError(
                f"with {self._transport.world} ranks the same [batch] gives {now} samples an update",
                expected=f"{before}, as in the checkpoint",
                remedy=f"set batch.global={before} and leave out what does not fit, or set another batch on purpose",
            )
        self.notes.append(f"an update has {now} samples now; it had {before}")
