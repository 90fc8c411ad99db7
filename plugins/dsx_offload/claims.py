"""What a tier was told to take, and how much of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from attrs import frozen

from dsx.plugin import positive

OPTIMIZER, GRADIENT, PARAMETER = "optimizer", "grad", "param"
"""What the option `states` may name: the masters and the rule's own states; gradients; parameters."""

_WHERE_NOT = {
    OPTIMIZER: "the optimizer keeps no state here, and the weights are no master weights",
    GRADIENT: "this layout keeps gradients whole until they are used, in buffers of its own",
    PARAMETER: "this layout keeps parameters whole on every rank, where the model reads them",
}


State = Literal["optimizer", "grad", "param"]


@frozen(kw_only=True)
class TierOptions:
    """What every tier is told."""

    states: tuple[State, ...] = ("optimizer",)
    limit_bytes: Annotated[int, positive] | None = None
    update: Literal["host", "device"] = "host"
    piece_bytes: Annotated[int, positive] = 4 << 20


class Claims:
    """Decides, state by state in the order of their creation, which are taken."""

    def __init__(self, options: TierOptions) -> None:
        self._groups: Sequence[str] = options.states
        self._left = options.limit_bytes
        self._met: set[str] = set()
        self._taken = False

    def take(self, name: str, size: int) -> bool:
        """Whether a state of `size` bytes is taken: it was named, and is within what is left of the limit."""
        group = name if name in (GRADIENT, PARAMETER) else OPTIMIZER
        if group not in self._groups:
            return False
        self._met.add(group)
        if self._left is not None:
            if size > self._left:
                return False
            self._left -= size
        self._taken = True
        return True

    def idle(self) -> str | None:
        """Why a claim has no effect, in words; None if each has one."""
        for group in self._groups:
            if group not in self._met:
                return f"claims '{group}', which this run has none of to put elsewhere: {_WHERE_NOT[group]}"
        if not self._groups:
            return "claims nothing: its `states` are empty"
        if not self._taken:
            return f"has a limit of {self._left} bytes, into which none of the states that it claims fits"
        return None
