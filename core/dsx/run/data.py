"""Samples of a source, dealt to ranks and micro-batches.

A source is anything with a length and `[i] -> sample`, or an iterable. It may have `held_out`, another source to
evaluate on, and `sample(model) -> str`, a text that shows what the model has learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from dsx.errors import DsxError
from dsx.run.order import shuffled

Fetch = Callable[[int], Any]


class Batches:
    """Micro-batches of each update for one rank.

    The samples of update s are those with global indices [s * global, (s + 1) * global); micro-batch m of rank r has
    the m-th stretch of micro * world of them, r-th part.
    """

    def __init__(
        self, source: Any, *, micro: int, accumulation: int, rank: int, world: int, seed: int, device: torch.device
    ) -> None:
        self._micro, self._accumulation, self._rank, self._world = micro, accumulation, rank, world
        self._device = device
        self._fetch = _indexed(source, seed) if hasattr(source, "__getitem__") else _streamed(source)

    @property
    def samples(self) -> int:
        """Samples of one update, over all ranks."""
        return self._micro * self._accumulation * self._world

    def update(self, number: int) -> Iterator[Any]:
        """This rank's micro-batches of update `number`, from 0."""
        for micro in range(self._accumulation):
            first = number * self.samples + (micro * self._world + self._rank) * self._micro
            yield collate([self._fetch(first + i) for i in range(self._micro)], self._device)


def collate(samples: Sequence[Any], device: torch.device) -> Any:
    """Samples stacked along a new first dimension, on `device`."""
    return to_device(default_collate(list(samples)), device)


def to_device(batch: Any, device: torch.device) -> Any:
    """Tensors of a batch on `device`; nested containers keep their kind."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    return batch


def tokens_of(sample: Any) -> int:
    """Elements of the first tensor of a sample; the number of tokens of a text."""
    if isinstance(sample, Tensor):
        return sample.numel()
    values: Iterable[Any] = sample.values() if isinstance(sample, Mapping) else sample
    if isinstance(values, (str, bytes)) or not hasattr(values, "__iter__"):
        return 1
    return next((tokens_of(value) for value in values if isinstance(value, Tensor)), 1)


def _indexed(source: Any, seed: int) -> Fetch:
    length = len(source)
    if length == 0:
        raise DsxError("the data source has no samples", where="data.source")
    return lambda index: source[shuffled(index, length, seed)]


def _streamed(source: Any) -> Fetch:
    """Samples of an iterable in its own order, started anew when it ends; each rank passes over the others' samples."""
    if not hasattr(source, "__iter__"):
        raise DsxError(
            f"the data source is a {type(source).__name__}",
            where="data.source",
            expected="something with a length and [i], or an iterable",
        )
    stream = iter(source)
    position = 0

    def fetch(index: int) -> Any:
        nonlocal stream, position
        if index < position:
            stream, position = iter(source), 0
        anew = False
        while True:
            for sample in stream:
                anew = False
                position += 1
                if position == index + 1:
                    return sample
            if anew:
                raise DsxError("the data source ended, and began no second time", where="data.source")
            stream, anew = iter(source), True

    return fetch
