"""The vote: one small all_reduce per update, by which all ranks come to the same decision from the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Ballot, Transport


@frozen
class Outcome:
    """Sums over all ranks.

    squares  of final gradients, raw
    loss     weighted losses of all micro-batches
    weight   of all micro-batches
    used     by parameter index, whether any rank had a gradient
    words    the layout's
    ballot   the rule's
    spare    the engine's own words
    """

    squares: float
    loss: float
    weight: float
    used: Sequence[bool]
    words: Sequence[float]
    ballot: Sequence[float]
    spare: Sequence[float]


def vote(
    transport: Transport, ballot: Ballot, loss: Tensor, weight: float, rule: Tensor, spare: Sequence[float] = ()
) -> Outcome:
    """Sum every rank's numbers; the copy to the host is the step's only synchronisation with a device.

    loss   0-dim, weighted sum of this rank's losses
    rule   the rule's own numbers: [any]
    spare  anybody's
    """
    squares, loss = _known(ballot.squares), _known(loss)
    device = squares.device
    fixed = torch.stack([squares.double(), _on(device, loss.double())])
    rest = (torch.tensor([weight, *spare], dtype=torch.float64), ballot.used, ballot.words, rule.double())
    numbers = torch.cat([fixed, _on(device, torch.cat(rest))])
    transport.all_reduce(numbers, "sum", channel="vote", purpose="vote").wait()
    squares_sum, loss_sum, weight_sum, *others = numbers.tolist()
    spared, others = others[: len(spare)], others[len(spare) :]
    used, words = len(ballot.used), len(ballot.words)
    return Outcome(
        squares_sum,
        loss_sum,
        weight_sum,
        [count > 0 for count in others[:used]],
        others[used : used + words],
        others[used + words :],
        spared,
    )


def _on(device: torch.device, numbers: Tensor) -> Tensor:
    """A copy to a device need not be waited for, one to the host must be."""
    return numbers.to(device, non_blocking=device.type != "cpu")


def _known(number: Tensor) -> Tensor:
    """One for a number on the meta device, where nothing has a value: there, every update is made."""
    return torch.ones(()) if number.is_meta else number
