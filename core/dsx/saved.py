"""Notices whether autograd keeps a weight for a backward that is still to come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dsx.contracts import memory_of


@contextmanager
def noting_saved(weights: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """A list of what autograd saves within the context that shares memory with one of `weights`."""
    homes = {memory_of(weight) for weight in weights}
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if memory_of(tensor) in homes:
            saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved
