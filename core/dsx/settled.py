"""The weights that all ranks have in common, where a rule lets their live parameters go apart between updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from dsx.contracts import Walk
from dsx.program import Program


class Settled:
    """`with engine.settled():` finishes the update under way, and shows the weights in the live parameters within.

    Entered by all ranks, to evaluate; nothing is trained within. Of rules whose live parameters are others than the
    weights (`Rule.apart`) they are derived again as the context is left.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._shown = program, False

    @contextmanager
    def __call__(self, show: bool = True) -> Iterator[None]:
        """show: False within a forward, which goes on with the parameters that it began with."""
        self._program.stepper.drain()
        self._program.layout.settle()
        if self._shown or not (show and self._program.rule.apart):
            yield
            return
        self._sweep(_show)
        self._shown = True
        try:
            yield
        finally:
            self._shown = False
            self.derive()

    def derive(self) -> None:
        """Make the parameters from the weights and the rule's states, and bring them to whoever needs them."""
        self._sweep(self._program.rule.derive)

    def _sweep(self, write: Callable[[Tensor, Mapping[str, Tensor]], None]) -> None:
        """Give `write` every parameter, and all states of it."""
        program, nothing = self._program, torch.empty(0)
        Walk(program.rule, program.layout, program.store).sweep(
            lambda piece, states: write(states["param"], states), program.layout.publish, gradient=lambda part: nothing
        )
        program.layout.settle()


def _show(param: Tensor, states: Mapping[str, Tensor]) -> None:
    param.copy_(states["master"])
