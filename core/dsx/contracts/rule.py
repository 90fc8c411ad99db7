"""Role `rule` (one filler): the optimizer's arithmetic. Role `groups` (one filler): which parameter has which
numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dsx.contracts.data import Hyper, Job, Piece, Run, State
from dsx.contracts.layout import Scope
from dsx.errors import CheckpointError


class Rule:
    """Base of optimizers.

    states        what it keeps for each shard, besides the core's `param`, `grad` and `master`
    block         pieces and parameters start at its multiples
    whole         a parameter is never split between pieces
    sums          numbers for each parameter that `update` needs summed over all of it; they cost a sweep of their own
    communicates  exchanges on channel `rule`; then it gets whole shards in the fixed order
    apart         between updates ranks' live parameters may be others than the weights, which are kept beside them as
                  `master` in any dtype; `derive` makes the former from the latter and the rule's states
    hyper         base hyperparameters; groups may change them, schedules multiply them

    The gradient is read as `clamp(grad * multiplier, ± clip_value)`, and is the rule's to overwrite in its last read.
    Writes `master`, its states, and `param`, which may be `master` itself, the live slice or a staging buffer. Touches
    the runs of a piece only. An element's bits do not depend on how the shard was cut into pieces.
    """

    states: Sequence[State] = ()
    block: int = 1
    whole: bool = False
    sums: int = 0
    communicates: bool = False
    apart: bool = False
    hyper: Hyper = Hyper()

    def scope(self, step: int) -> Scope:
        """Whether update number `step` needs gradients averaged over ranks; the same on all ranks.

        After "local" each rank's `update` is given its own gradient of the whole flat parameter and the whole live
        `param`, whatever part of it the piece is, and makes the latter the same on all ranks by exchanges of its own.
        """
        return "mean"

    def ballot(self) -> Tensor:
        """Numbers to be summed over all ranks in the vote: [any], fp64."""
        return torch.zeros(0, dtype=torch.float64)

    def decided(self, summed: Sequence[float]) -> None:
        """The sums of all ranks' `ballot`, before the update they belong to."""

    def measure(self, piece: Piece, states: Mapping[str, Tensor], job: Job, out: Tensor) -> None:
        """First sweep, only if `sums`: add this piece's part of each number into `out` [sums, parameters]."""

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> Iterator[object] | None:
        """Update a piece in one pass.

        One that communicates may return an iterator, such as a generator: it does the work, and pauses where it would
        wait for other ranks; the next pieces begin meanwhile.

        states  grad, master, param and the rule's own: element states [len(piece)], block states [len(piece) / block];
                whole are segment states, and those of other scopes than `shard`
        sums    [sums, parameters], complete
        """
        raise NotImplementedError

    def derive(self, param: Tensor, states: Mapping[str, Tensor]) -> None:
        """Write a shard's parameter from its weights, `master`, and its other states: a checkpoint has no parameter.

        After `load`.
        """
        param.copy_(states["master"])

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps that is no tensor of a shard: phase, seed.

        `private`, if it is there and true, is the name of an optimizer whose states now mean nothing to any other.
        """
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Here, `CheckpointError` for what is private to another optimizer."""
        if owner := state.get("private"):
            raise CheckpointError(
                f"the optimizer's states in the checkpoint are those of {owner}, which no other can go on with",
                remedy=f"resume with {owner}, or start from the weights alone",
            )


class ViewRule(Rule):
    """Base of elementwise rules over one kernel call for lists of tensors, one view for each parameter.

    torch's kernels round vector tails differently, so an element's bits depend on where its tensor starts: a parameter
    is therefore given whole, as a plain PyTorch optimizer would see it.
    """

    whole = True

    def apply(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        states: Mapping[str, list[Tensor]],
        steps: list[int],
        hyper: Hyper,
    ) -> None:
        """Update `weights` (1-D, master dtype) in place from `grads` (same dtype, multiplied and clamped).

        states  the rule's element states, by name, one view for each weight; segment states as 0-dim views
        steps   number of updates of each weight, this one included
        """
        raise NotImplementedError

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> None:
        groups: dict[Hyper, list[Run]] = {}
        for run in piece.runs(job, merge=False):
            groups.setdefault(run.hyper, []).append(run)
        if not groups:
            return
        master, param = states["master"], states["param"]
        gradient = states["grad"].to(master.dtype)
        numbers = {segment.index: number for number, segment in piece.places()}
        for hyper, runs in groups.items():
            weights, grads = [master[run.where] for run in runs], [gradient[run.where] for run in runs]
            if job.multiplier != 1.0:
                torch._foreach_mul_(grads, job.multiplier)
            if (limit := hyper.get("clip_value")) is not None:
                torch._foreach_clamp_min_(grads, -limit)
                torch._foreach_clamp_max_(grads, limit)
            views = {
                state.name: [
                    states[state.name][numbers[run.index] if state.shape == "segment" else run.where] for run in runs
                ]
                for state in self.states
            }
            self.apply(weights, grads, views, [run.step for run in runs], hyper)
            if param.data_ptr() != master.data_ptr():
                torch._foreach_copy_([param[run.where] for run in runs], weights)


class Groups:
    """The null part: one group, `all`, with the rule's own numbers."""

    def assign(self, name: str, parameter: nn.Parameter) -> str:
        """The group of a parameter."""
        return "all"

    def hypers(self, base: Hyper) -> Mapping[str, Hyper]:
        """Hyperparameters of every group, from the rule's."""
        return {"all": base}
