"""The engine: the walk of one step. It knows parts by their roles and no technique by its name."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from dsx.contracts import Hyper, Job, Report
from dsx.errors import DsxError, near
from dsx.program import Program
from dsx.units import plain
from dsx.vote import Outcome, vote


@frozen
class MicroBatch:
    """A batch with its weight in the window, for `Engine.train_step`."""

    batch: Any
    weight: float = 1.0


class Engine:
    """Trains one model. Made by `dsx.prepare`.

        loss = engine(batch)
        engine.backward(loss)
        report = engine.step()       # once per micro-batch; updates when the window is full

    model    the module that was given; its parameters are views of flat buffers now
    program  the parts
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
        self.words: dict[str, Callable[[], float]] = {}
        self._weights: list[float] = []
        self._micro_weight: float | None = None
        self._loss: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with the run's precision."""
        return self.program.dtypes.call(self.model, args, kwargs)

    def backward(self, output: Any, weight: float = 1.0) -> None:
        """Accumulate gradients of a loss.

        output  the loss, 0-dim; or the model's output: a mapping or object with `loss`
        weight  of this micro-batch among all of the window, on all ranks; its number of tokens, to average over tokens

        Several backwards before one `step` belong to one micro-batch and add up.
        """
        loss = loss_of(output)
        self._note(loss, weight)
        self._pass(self.program.scaler.scale(loss * weight / self.accumulation).backward)

    def _pass(self, backward: Callable[[], object]) -> None:
        layout, rule = self.program.layout, self.program.rule
        layout.begin_backward(self._micro + 1 == self.accumulation, rule.scope(self.steps + 1))
        backward()
        layout.end_backward()

    def step(self, close: bool = False) -> Report:
        """Count a micro-batch; when the window is full, update the weights.

        close  update now although the window is not full (the end of the data): the mean is over what was there
        """
        if self._micro_weight is None:
            self._pass(lambda: None)  # this rank has no data: it takes part in what the others exchange
        self._micro += 1
        self._weights.append(self._micro_weight or 0.0)
        self._micro_weight = None
        report = self._update() if self._micro == self.accumulation or close else self._waiting()
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
        self._micro, self._weights, self._loss = 0, [], None
        if weight == 0:
            program.layout.reset()
            raise DsxError(
                "step() without a backward on any rank",
                remedy="call engine.backward(loss) before it, with a weight above 0",
            )
        norm = math.sqrt(outcome.squares) / scale / weight if outcome.squares >= 0 else math.nan
        finite = math.isfinite(norm)
        program.scaler.update(finite)
        program.stepper.settle()
        loss, words = outcome.loss / outcome.weight, dict(zip(self.words, outcome.spare, strict=True))
        if not finite:
            self.skips += 1
            program.layout.reset()
            return Report(
                step=self.steps,
                stepped=False,
                skipped=True,
                skips=self.skips,
                loss=loss,
                norm=norm,
                scale=scale,
                words=words,
            )
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
        while True:
            ballot = program.layout.finish()
            outcome = vote(program.transport, ballot, loss, weight, program.rule.ballot(), spare)
            if not program.layout.agreed(outcome.used, outcome.words):
                return outcome

    def _start(self, outcome: Outcome, multiplier: float) -> Mapping[str, Hyper]:
        program = self.program
        self.steps += 1
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
    def gathered(self, names: str | Sequence[str] | nn.Module, modify: bool = False) -> Iterator[None]:
        """Whole parameters within the context, under any layout.

        names   of parameters, or a module for all of its
        modify  edits made to them by rank 0 become the weights, on every rank
        """
        wanted = self._names(names)
        self.quiesce()
        with self.program.layout.gathered(wanted, modify):
            yield

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every authoritative weight, frozen ones included, one whole at a time, on every rank.

        A parameter that has several names comes under its first one.
        """
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

    def _between_updates(self, what: str) -> None:
        if self._micro or self._micro_weight is not None:
            raise DsxError(
                f"{what} was called within a window of micro-batches",
                found=f"{self._micro} of {self.accumulation} micro-batches made",
                remedy="call it after a step() whose report says `stepped` or `skipped`, or close the window first",
            )

    def close(self) -> None:
        """Finish what is under way, and give back what parts took."""
        self.quiesce()
        for observer in self.program.observers:
            observer.finish()
        self.program.store.close()
        self.program.transport.close()

    def quiesce(self) -> None:
        """Finish and publish updates under way; before anything outside a forward reads or writes weights."""
        self.program.stepper.drain()
        self.program.layout.settle()

    def _names(self, names: str | Sequence[str] | nn.Module) -> list[str]:
        """First names of the parameters meant; a tied one may be asked for by any of its names."""
        model = plain(self.model)
        first = {id(parameter): name for name, parameter in model.named_parameters()}
        if isinstance(names, nn.Module):
            return [first[id(parameter)] for parameter in names.parameters()]
        known = dict(model.named_parameters(remove_duplicate=False))
        wanted = [names] if isinstance(names, str) else list(names)
        for name in wanted:
            if name not in known:
                raise DsxError(f"the model has no parameter '{name}'", remedy=near(name, known))
        return [first[id(known[name])] for name in wanted]


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returned: itself, or `loss` of a mapping or object."""
    loss = output
    if not isinstance(output, Tensor):
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise DsxError(
            f"the model's output has no loss: {type(output).__name__}",
            expected="a tensor, or a mapping or object with `loss`",
        )
    if loss.numel() != 1:
        raise DsxError(f"the loss has the shape {list(loss.shape)}", expected="one number: take its mean")
    if not loss.requires_grad:
        raise DsxError(
            "the loss does not depend on any trainable parameter",
            remedy="compute it from the model's output, outside torch.no_grad()",
        )
    return loss.reshape(())


def _folder(path: str | Path) -> Path:
    if not isinstance(path, (str, Path)) or not str(path):
        raise ValueError(f"the folder of a checkpoint is {path!r}")
    return Path(path)


def forward(engine: Engine, batch: Any) -> Any:
    """Call the engine on a batch: a mapping as keyword arguments, a tuple or list as positional ones."""
    if isinstance(batch, Mapping):
        return engine(**batch)
    return engine(*batch) if isinstance(batch, (tuple, list)) else engine(batch)
