"""Finds out what an optimizer class keeps for a parameter, and whether it treats elements alone, by trying it."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from attrs import frozen
from torch import Tensor
from torch.optim import Optimizer

from dsx.contracts import Hyper, State
from dsx.errors import DsxError, near

Make = Callable[[list[Tensor]], Optimizer]

_WHERE = "[optimize.torch_optimizer]"
_ELEMENTWISE = "an optimizer whose update of an element depends on nothing but that element's own numbers"

# Unlike in size, so that a norm or a mean over some of them shows.
_WEIGHTS = (0.5, -1.0, 2.0, 0.25, -30.0, 40.0, 15.0, -7.5)
_GRADIENTS = ((1.0, -0.5, 0.125, 2.0, -40.0, 80.0, 30.0, -60.0), (0.5, 0.25, -1.0, 1.5, 20.0, -10.0, 70.0, 50.0))


@frozen
class Found:
    """What is known of an optimizer once it was tried.

    optimizer  one of its kind, not used yet
    hyper      the options of its group
    states     what it keeps for a parameter: of its shape, or one number
    numbers    Python types of those states that are no tensors
    early      whether the constructor makes them, not the first step
    """

    optimizer: Optimizer
    hyper: Hyper
    states: Sequence[State]
    numbers: Mapping[str, type]
    early: bool


def find(name: str) -> type[Optimizer]:
    """The optimizer class called `name`: one of torch.optim, or "module:Class". `DsxError` if there is none."""
    where = f"{_WHERE} name"
    module, colon, path = name.partition(":")
    if not colon:
        known = {key: value for key, value in vars(torch.optim).items() if _is_optimizer(value)}
        if name not in known:
            raise DsxError(
                f"torch.optim has no optimizer '{name}'",
                where=where,
                expected=f'one of {", ".join(sorted(known))}, or "module:Class"',
                remedy=near(name, known),
            )
        return known[name]
    try:
        found: Any = getattr(importlib.import_module(module), path)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise DsxError(f"there is no optimizer '{name}'", where=where, found=str(error)) from error
    if not _is_optimizer(found):
        raise DsxError(f"'{name}' is no optimizer", where=where, expected="a subclass of torch.optim.Optimizer")
    return found


def _is_optimizer(value: object) -> TypeGuard[type[Optimizer]]:
    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer


def maker(kind: type[Optimizer], name: str, arguments: Mapping[str, Any]) -> Make:
    """Makes optimizers of this kind. `DsxError` for an argument that it does not have."""
    known = inspect.signature(kind).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        own = [key for key in known if key != "params"]
        for key in arguments:
            if key not in own:
                raise DsxError(
                    f"'{name}' has no argument '{key}'",
                    where=f"{_WHERE[:-1]}.arguments]",
                    expected=f"one of {', '.join(own)}",
                    remedy=near(key, own),
                )
    return lambda parameters: kind(parameters, **arguments)


def probe(make: Make, name: str, device: torch.device) -> Found:
    """Try an optimizer on small parameters. `DsxError` if it cannot be made, or is not elementwise."""
    weight, gradients = (torch.tensor(values, dtype=torch.float64, device=device) for values in (_WEIGHTS, _GRADIENTS))
    try:
        optimizer = make([torch.zeros(8, device=device)])
    except Exception as error:
        raise _refusal(name, f"cannot be made: {error}", "change its arguments, or take another optimizer") from error
    try:
        trial = _Trial(make, weight, gradients)
        halves = [_Trial(make, weight[part], gradients[:, part]).weight for part in (slice(4), slice(4, 8))]
        matrix = _Trial(make, weight.view(2, 4), gradients.view(2, 2, 4)).weight
    except Exception as error:
        raise _refusal(name, f"cannot update a vector: {error}") from error
    if trial.restless:
        raise _refusal(name, f"keeps numbers outside the state of a parameter: {', '.join(trial.restless)}")
    states = [_state(name, key, value) for key, value in trial.state.items()]
    if trial.first != list(trial.state):
        raise _refusal(name, "makes new states after its first step")
    others = (torch.cat(halves), matrix.flatten())
    if not all(torch.allclose(trial.weight, other, rtol=1e-12, atol=1e-14) for other in others):
        raise _refusal(name, "is not elementwise: its update mixes elements of a parameter")
    numbers = {key: type(value) for key, value in trial.state.items() if not isinstance(value, Tensor)}
    return Found(optimizer, _hyper(optimizer), states, numbers, trial.early)


class _Trial:
    """One update for each row of `gradients`.

    weight    afterwards
    state     afterwards
    first     names of the states after the first step
    early     whether there were states before it
    restless  options of the group and attributes of the optimizer that changed
    """

    def __init__(self, make: Make, weight: Tensor, gradients: Tensor) -> None:
        self.weight = weight.clone()
        optimizer = make([self.weight])
        self.early = bool(optimizer.state[self.weight])
        before = _own(optimizer)
        for number, gradient in enumerate(gradients):
            self.weight.grad = gradient.clone()
            optimizer.step()
            if number == 0:
                self.first = list(optimizer.state[self.weight])
        self.state = dict(optimizer.state[self.weight])
        after = _own(optimizer)
        self.restless = sorted(key for key in after if after[key] != before.get(key))


def _own(optimizer: Optimizer) -> dict[str, object]:
    """The numbers of an optimizer that belong to no parameter."""
    held = {key: value for key, value in vars(optimizer).items() if type(value) in (int, float)}
    return held | dict(_hyper(optimizer))


def _hyper(optimizer: Optimizer) -> Hyper:
    """The options of its group; lists as tuples, since hyperparameters are keys."""
    group = optimizer.param_groups[0]
    return Hyper(
        {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
    )


def _state(name: str, key: str, value: Any) -> State:
    """What a state of the tried vector [8], float64, is for any parameter."""
    if isinstance(value, (int, float)):
        return State(key, dtype=torch.float64, shape="segment")
    if not isinstance(value, Tensor) or value.shape not in ((), (8,)):
        shape = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise _refusal(name, f"keeps a state '{key}' that is neither of the parameter's shape nor one number: {shape}")
    dtype = None if value.dtype == torch.float64 else value.dtype
    return State(key, dtype=dtype, shape="element" if value.ndim else "segment")


def _refusal(name: str, why: str, remedy: str = "take another optimizer") -> DsxError:
    return DsxError(
        f"torch_optimizer cannot run '{name}': it {why}",
        where=f"{_WHERE} name",
        expected=_ELEMENTWISE,
        remedy=remedy,
    )
