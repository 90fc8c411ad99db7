"""Role `observers`: listens. A chain in manifest order; costs nothing when nobody listens."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from dsx.contracts.data import Report


@frozen
class RunInfo:
    """What is about to be trained.

    name        of the run
    steps       updates planned
    parameters  trainable elements of the model
    world       ranks
    samples     samples of one update, over all ranks
    tokens      elements of the first tensor of one sample; a text's tokens
    folder      where the run keeps its files; None: it keeps none
    """

    name: str
    steps: int
    parameters: int
    world: int
    samples: int
    tokens: int
    folder: Path | None = None


@frozen
class Evaluation:
    """A pass over held-out samples; the same on every rank.

    step     updates made before it
    loss     mean over all samples
    samples  how many, over all ranks
    seconds  it took
    """

    step: int
    loss: float
    samples: int
    seconds: float


class Observer:
    """Base of listeners: every method does nothing. They run on every rank; reports are the same on all of them."""

    def start(self, info: RunInfo) -> None:
        """`dsx run` is about to train."""

    def report(self, report: Report) -> None:
        """A step was taken; called after each `engine.step()`, also within a window."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """`dsx run` has evaluated."""

    def finish(self) -> None:
        """Training is over, by success or failure: close files, end bars."""
