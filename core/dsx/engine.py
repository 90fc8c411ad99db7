"""The engine: the walk of one step. It knows parts by their roles and no technique by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from dsx.batch import MicroBatch, forward, loss_of
from dsx.contracts import Hyper, Job, Report
from dsx.errors import DsxError
from dsx.expected import expect
from dsx.names import first_names, listed
from dsx.program import Program
from dsx.released import explained
from dsx.roll_call import ROLL_CALL_S, roll_call
from dsx.saved import noting_saved
from dsx.settled import Settled
from dsx.units import plain
from dsx.vote import Outcome, vote


class Engine:
    """Trains one model. Made by `dsx.prepare`.

        loss = engine(batch)
        engine.backward(loss)
        report = engine.step()       # once per micro-batch; updates when the window is full

    model    the module that was given; its parameters are views of flat buffers now
    program  the parts
    settled  `with engine.settled():` shows the weights that all ranks have in common, to evaluate: `Settled`
    words    numbers to be summed over ranks with each update's vote, by name, such as a wish to stop; the same names on
             every rank. The sums are in the report
    steps    updates made
    skips    updates skipped because a gradient was not finite
    """

    def __init__(
        self,
        model: nn.Module,
        program: Program,
        *,
        accumulation: int = 1,
        clip_norm: float | None = None,
        overlap_publish: bool = False,
    ) -> None:
        self.model, self.program, self.accumulation = model, program, accumulation
        self._clip = math.inf if clip_norm is None else clip_norm
        self._overlap_publish = overlap_publish
        self.steps = self.skips = self._micro = 0
        self.counts = [0] * len(program.parameters)
        self._used: Sequence[bool] = (True,) * len(program.parameters)  # in the last update
        self.words: dict[str, Callable[[], float]] = {}
        self._weights: list[float] = []
        self._micro_weight: float | None = None
        self._loss: Tensor | None = None
        self._sync, self._uneven, self._depth, self._begun = True, False, 0, False
        self._held = ExitStack()
        self.settled = Settled(program)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with the run's precision."""
        if self.program.watch.attached:
            self.program.watch.walk()
        self._begun = self._begun or torch.is_grad_enabled()
        self._depth += 1
        try:
            with explained():
                return self.program.dtypes.call(self.model, args, kwargs)
        finally:
            self._depth -= 1

    def backward(self, output: Any, weight: float = 1.0, retain_graph: bool = False) -> None:
        """Accumulate gradients of a loss.

        output        the loss, 0-dim; or the model's output: a mapping or object with `loss`
        weight        of this micro-batch among all of the window, on all ranks; its number of tokens, to average over
                      tokens
        retain_graph  as in torch: another backward through the same graph follows

        Several backwards before one `step` belong to one micro-batch and add up.
        """
        self._even("engine.backward()")
        loss = loss_of(output)
        self._note(loss, weight)
        scaled = self.program.scaler.scale(loss * weight / self.accumulation)
        self._pass(partial(scaled.backward, retain_graph=retain_graph))

    def _pass(self, backward: Callable[[], object]) -> None:
        layout, rule = self.program.layout, self.program.rule
        self._begun = True
        last, scope = self._micro + 1 == self.accumulation, rule.scope(self.steps + 1)
        if last and self._sync and scope == "mean":
            weight = math.fsum([*self._weights, self._micro_weight or 0.0]) / self.accumulation
            expect(self.program, self.steps + 1, weight, self.counts, self._used)
        with self.program.connection.backward(), explained(), self.program.dtypes.backward():
            layout.begin_backward(last, scope, self._sync)
            backward()
            layout.end_backward()

    @contextmanager
    def accumulate(self, *, sync: bool = False) -> Iterator[None]:
        """With `sync=False`, backwards within keep their gradients whole and reduce nothing, as DDP's `no_sync`.

        Under layouts that shard gradients, memory for whole gradients instead of traffic in each micro-batch. What was
        kept is reduced by the next backward outside, or by the `step` that updates, which then waits for it. The same
        on all ranks.
        """
        before, self._sync = self._sync, sync
        try:
            yield
        finally:
            self._sync = before

    def step(self, close: bool = False) -> Report:
        """Count a micro-batch; when the window is full, update the weights.

        close  update now although the window is not full (the end of the data): the mean is over what was there
        """
        self._even("engine.step()")
        self._held.close()
        updates = close or self._micro + 1 == self.accumulation
        if updates:
            self.program.watch.look()
        if self._micro_weight is None:
            self.program.layout.absent()  # this rank has no data: it takes part in what the others exchange
            self._pass(lambda: None)
        self._micro += 1
        self._weights.append(self._micro_weight or 0.0)
        self._micro_weight = None
        report = self._update() if updates else self._waiting()
        for observer in self.program.observers:
            observer.report(report)
        return report

    def train_step(self, batches: Iterable[Any]) -> Report:
        """All micro-batches of one update: forward, backward and step of each; closes the window after the last.

        A batch that is a mapping is given as keyword arguments, a tuple or list as positional ones; a `MicroBatch` has
        a weight too.
        """
        following = iter(batches)
        item = next(following, None)
        if item is None:
            raise DsxError("train_step was given no batch")
        while item is not None:
            micro = item if isinstance(item, MicroBatch) else MicroBatch(item)
            self.backward(forward(self, micro.batch), micro.weight)
            item = next(following, None)
            report = self.step(close=item is None)
        return report

    def _waiting(self) -> Report:
        return Report(step=self.steps, stepped=False, skips=self.skips, scale=self.program.scaler.value)

    def _update(self) -> Report:
        program, scale = self.program, self.program.scaler.value
        outcome = self._vote()
        weight = outcome.weight / (program.transport.world * self.accumulation)
        self._micro, self._weights, self._loss, self._begun = 0, [], None, False
        if weight == 0:
            self._forget()
            raise DsxError(
                "step() without a backward on any rank",
                remedy="call engine.backward(loss) before it, with a weight above 0",
            )
        if not all(outcome.used):
            self._refuse_frozen(outcome.used)
        norm = math.sqrt(outcome.squares) / scale / weight if outcome.squares >= 0 else math.nan
        program.stepper.settle()
        loss, words = outcome.loss / outcome.weight, dict(zip(self.words, outcome.spare, strict=True))
        if not math.isfinite(norm):
            self._skip()
            return evolve(self._waiting(), skipped=True, loss=loss, norm=norm, scale=scale, words=words)
        program.scaler.update(True)
        multiplier = min(1.0, self._clip / (norm + 1e-6)) / scale / weight
        hypers = self._start(outcome, multiplier)
        return Report(
            step=self.steps,
            stepped=True,
            skips=self.skips,
            loss=loss,
            norm=norm,
            scale=scale,
            multiplier=multiplier,
            lr={group: hyper.lr for group, hyper in hypers.items() if "lr" in hyper},
            words=words,
        )

    def _vote(self) -> Outcome:
        program, weight = self.program, math.fsum(self._weights)
        loss = torch.zeros(()) if self._loss is None else self._loss
        spare = [word() for word in self.words.values()]
        program.stepper.voting()
        while True:
            ballot = program.layout.finish()
            outcome = vote(program.transport, ballot, loss, weight, program.rule.ballot(), spare)
            if not program.layout.agreed(outcome.used, outcome.words):
                return outcome

    def _skip(self) -> None:
        self.skips += 1
        try:
            self.program.scaler.update(False)
        finally:
            self._forget()

    def _refuse_frozen(self, used: Sequence[bool]) -> None:
        try:
            self.program.watch.unused(used)
        except DsxError:
            self._forget()
            raise

    def _forget(self) -> None:
        self.program.stepper.forget()
        self.program.layout.reset()

    def _start(self, outcome: Outcome, multiplier: float) -> Mapping[str, Hyper]:
        program = self.program
        self.steps += 1
        self._used = tuple(outcome.used)
        self.counts = [count + used for count, used in zip(self.counts, outcome.used, strict=True)]
        program.rule.decided(outcome.ballot)
        hypers = program.schedule.at(self.steps, program.hypers)
        program.stepper.start(Job(hypers, multiplier, outcome.used, tuple(self.counts), self.steps))
        if not self._overlap_publish:
            program.layout.settle()
        return hypers

    def _note(self, loss: Tensor, weight: float) -> None:
        """Keep a loss and its weight for the report and the mean, without waiting for the device."""
        if not (math.isfinite(weight) and weight >= 0):
            raise DsxError(f"the weight of a micro-batch is {weight}", expected="a finite number of 0 or more")
        if self._micro_weight not in (None, weight):
            raise DsxError(
                "two backwards of one micro-batch have different weights",
                found=f"{self._micro_weight} and {weight}",
                remedy="give both the same weight, or call step() between them",
            )
        self._micro_weight = weight
        share = loss.detach().double() * weight
        self._loss = share if self._loss is None else self._loss + share

    @contextmanager
    def gathered(
        self, names: str | Sequence[str] | nn.Module, modify: bool = False, timeout_s: float = ROLL_CALL_S
    ) -> Iterator[None]:
        """Whole parameters within the context, under any layout; entered by all ranks, also in the middle of a forward.

        names      of parameters, or a module for all of its
        modify     edits made to them by rank 0 become the weights, on every rank; between updates only
        timeout_s  how long to wait for the other ranks

        What is computed from them has gradients; then they stay whole until `step`.
        Raises `RankMismatch` naming the ranks that have not entered it.
        """
        wanted = first_names(self.model, names)
        what = f"engine.gathered({listed(wanted)}{', modify=True' if modify else ''})"
        if modify:
            self._between_updates(what)
        if not self._uneven:
            roll_call(self.program.transport, what, timeout_s, content=wanted)
        named = dict(plain(self.model).named_parameters())
        with ExitStack() as stack:
            if self._begun:
                self.program.layout.settle()  # what has begun goes on with the weights it began with
            else:
                stack.enter_context(self.settled(show=not self._depth))
            stack.enter_context(self.program.layout.gathered(wanted, modify))
            with noting_saved(named[name] for name in wanted) as saved:
                yield
            if saved and not modify:
                self._held.push(stack.pop_all())  # until `step`: backward reads them too
        if modify:
            self.program.watch.accept(wanted)

    @contextmanager
    def uneven(self, timeout_s: float = ROLL_CALL_S) -> Iterator[None]:
        """Ranks may make different numbers of forwards within the context: `generate` of different lengths, say.

        Entered by all ranks; leaving it waits until all have left. Nothing can be trained within.

        timeout_s  how long to wait for the other ranks to enter
        Raises `RankMismatch` naming the ranks that have not entered it.
        """
        self._even("engine.uneven()")
        roll_call(self.program.transport, "engine.uneven()", timeout_s)
        self.quiesce()
        self._uneven = True
        try:
            with self.program.layout.uneven():
                yield
        finally:
            self._uneven = False

    def _even(self, what: str) -> None:
        if self._uneven:
            raise DsxError(
                f"{what} was called within engine.uneven()",
                expected="forwards only: the ranks need not be at the same place",
                remedy="leave the context first",
            )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every authoritative weight, frozen ones included, one whole at a time, on every rank.

        A parameter that has several names comes under its first one.
        """
        self._even("engine.weights()")
        self.quiesce()
        with torch.no_grad():
            yield from self.program.layout.logical("weight")

    def save(self, path: str | Path, extra: Mapping[str, Any] | None = None) -> None:
        """Write a checkpoint to the folder `path`; called by all ranks, between updates.

        extra  JSON of yours to keep with it, the same on all ranks
        Raises the same `CheckpointError` on all ranks if it fails on any; then nothing is left of it.
        """
        from dsx.checkpoint.folder import save

        self._between_updates("save")
        save(self, _folder(path), extra=extra)

    def load(self, path: str | Path) -> Mapping[str, Any]:
        """Continue from the checkpoint in the folder `path`, of any world size; called by all ranks. Returns `extra`.

        Raises the same `CheckpointError` on all ranks if it is partial, damaged, or does not fit the model.
        """
        from dsx.checkpoint.folder import load

        self._between_updates("load")
        return load(self, _folder(path)).extra

    def export(
        self,
        out: str | Path,
        dtype: torch.dtype | str | None = None,
        shard_bytes: int | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """Write the weights to the folder `out`, as `dsx.export` does from a checkpoint; called by all ranks.

        One unit is whole at a time, and rank 0 writes. Raises the same `CheckpointError` on all ranks.
        """
        from dsx.weights.live import export_engine

        self._even("engine.export()")
        export_engine(self, _folder(out), dtype, shard_bytes, overwrite)

    def _between_updates(self, what: str) -> None:
        self._even(what)
        if self._micro or self._micro_weight is not None or self._depth:
            made = f"{self._micro} of {self.accumulation} micro-batches made"
            raise DsxError(
                f"{what} was called within a window of micro-batches",
                found="a forward under way" if self._depth else made,
                remedy="call it after a step() whose report says `stepped` or `skipped`, or close the window first",
            )

    def close(self) -> None:
        """Finish what is under way, give back what parts took, and let go of the model."""
        self._held.close()
        self.quiesce()
        self.program.watch.close()
        self.program.connection.close()
        for observer in self.program.observers:
            observer.finish()
        self.program.stepper.close()
        self.program.store.close()
        self.program.transport.close()

    def quiesce(self) -> None:
        """Finish and publish updates under way; before anything outside a forward reads or writes weights."""
        self.program.stepper.drain()
        self.program.layout.settle()


def _folder(path: str | Path) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise ValueError(f"the folder of a checkpoint is {path!r}")
    return Path(path)
