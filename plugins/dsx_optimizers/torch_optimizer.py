"""Plugin `torch_optimizer`: any elementwise `torch.optim.Optimizer`, torch's own or anybody's, as a rule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from dsx.contracts import Hyper, ViewRule, with_values
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx_optimizers.probe import Make, find, maker, probe


@frozen(kw_only=True)
class Options:
    """`[optimize.torch_optimizer]`.

    name       "RMSprop", a class of torch.optim; or "module:Class"
    arguments  its own arguments, without the parameters
    """

    name: str
    arguments: Mapping[str, object] = field(factory=dict)


class TorchOptimizer(ViewRule):
    """The same bits as the class on the same parameters, each as a vector.

    make    makes the optimizer of some parameters
    name    for messages
    device  on which the parameters are

    One optimizer is made; at each update its group is given views of weights and states instead of tensors of its own.
    Raises `DsxError` for a class that is not elementwise.
    """

    def __init__(self, make: Make, name: str, device: torch.device) -> None:
        found = probe(make, name, device)
        self._make, self._early, self._numbers = make, found.early, found.numbers
        self._optimizer = found.optimizer
        self.states, self.hyper = found.states, found.hyper

    def apply(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        states: Mapping[str, list[Tensor]],
        steps: list[int],
        hyper: Hyper,
    ) -> None:
        optimizer = self._optimizer
        group = optimizer.param_groups[0]
        group.update({name: hyper[name] for name in self.hyper}, params=weights)
        for number, (weight, grad, step) in enumerate(zip(weights, grads, steps, strict=True)):
            weight.grad = grad
            optimizer.state[weight] = self._first(weight) if step == 1 else self._given(states, number)
        optimizer.step()
        for number, weight in enumerate(weights):
            self._keep(optimizer.state.pop(weight), states, number)
        group["params"] = []

    def _first(self, weight: Tensor) -> dict[str, Any]:
        """The state of a parameter that was never updated: what the constructor makes; most classes wait for `step`."""
        return dict(self._make([weight]).state[weight]) if self._early else {}

    def _given(self, states: Mapping[str, list[Tensor]], number: int) -> dict[str, Any]:
        views = {name: several[number] for name, several in states.items()}
        return {
            name: self._numbers[name](view.item()) if name in self._numbers else view for name, view in views.items()
        }

    def _keep(self, held: Mapping[str, Any], states: Mapping[str, list[Tensor]], number: int) -> None:
        """Into the views, where the class made new values instead of changing the views themselves."""
        for name, several in states.items():
            view, value = several[number], held[name]
            if name in self._numbers:
                view.fill_(value)
            elif value is not view:
                view.copy_(value)


descriptor = Descriptor(
    name="torch_optimizer",
    section="optimize",
    contract=1,
    options=Options,
    fills={"rule": Fill(offers={"rule.silent", "rule.elementwise"})},
    summary="any elementwise optimizer of torch.optim or of your own",
)


@hook
def dsx_optimize(options: Options) -> list[Part]:
    return [
        Part(
            "rule",
            lambda ctx: TorchOptimizer(
                maker(find(options.name), options.name, options.arguments), options.name, with_values(ctx.plan.device)
            ),
        )
    ]
