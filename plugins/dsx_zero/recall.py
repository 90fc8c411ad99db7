"""Weights that autograd saved are brought back when it reads them, whichever way their gradient came."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import memory_of


@frozen(eq=False)
class _Saved:
    """A tensor as autograd saved it, the version of its contents then, and the unit whose weight it is, or None."""

    tensor: Tensor
    version: int
    number: int | None


class Recall:
    """Between `push` and `pop` what autograd saves is looked at: reading a weight of a unit asks for the unit first.

    A unit's backward usually starts at its output. One that starts elsewhere, at a loss that a module keeps as an
    attribute, would read memory that is not there, or is still on its way.

    owner  of a memory, as `memory_of` numbers it: number of the unit, or None
    want   makes a unit live
    """

    def __init__(self, owner: Callable[[int], int | None], want: Callable[[int], None]) -> None:
        self._owner, self._want = owner, want
        self._within: list[int] = []

    def push(self, number: int) -> None:
        """Into the forward of a unit. Where others look already, nothing: the unit around this one's serve all units,
        and recomputation or offload keep no weights."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._within.append(number)

    def pop(self, number: int) -> None:
        """Out of it; nothing where `push` did nothing."""
        if self._within and self._within[-1] == number:
            self._within.pop()
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, tensor._version, self._owner(memory_of(tensor)))

    def _unpack(self, saved: _Saved) -> Tensor:
        if saved.number is not None:
            self._want(saved.number)
        tensor = saved.tensor
        if tensor._version != saved.version:  # torch does not look where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(tensor.shape)} is at version {tensor._version}; expected version {saved.version}"
            )
        return tensor
