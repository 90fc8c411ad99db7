"""Samples dealt to ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from dsx.batch import MicroBatch
from dsx.run.samples import samples_of


class Batches:
    """Micro-batches of each update for one rank.

    The samples of update s are those with global indices [s * global, (s + 1) * global), counted from where the run was
    resumed; micro-batch m of rank r has the m-th stretch of micro * world of them, r-th part.
    """

    def __init__(
        self, source: Any, *, micro: int, accumulation: int, rank: int, world: int, seed: int, device: torch.device
    ) -> None:
        self._micro, self._accumulation, self._rank, self._world = micro, accumulation, rank, world
        self._device = device
        self._samples = samples_of(source, seed)
        self._wanted = {slot for micro_batch in range(accumulation) for slot in self._slots(micro_batch)}
        self._number = self._first = 0

    @property
    def samples(self) -> int:
        """Samples of one update, over all ranks."""
        return self._micro * self._accumulation * self._world

    def update(self, number: int) -> Iterator[MicroBatch]:
        """This rank's micro-batches of update `number`, from 0; none once the data has ended.

        In the last, incomplete window of a source that ends, micro-batches weigh what they have of their samples; every
        rank makes the same number of them, one without samples at weight 0.
        """
        window = self._samples.window(self.index(number), self.samples, self._wanted)
        for micro_batch in range(self._accumulation):
            if micro_batch * self._world * self._micro >= window.count:
                return
            present = [slot for slot in self._slots(micro_batch) if slot < window.count]
            samples = [window[slot] for slot in present] or [window.spare()]
            yield MicroBatch(collate(samples, self._device), len(present) / self._micro)

    def first(self) -> Any:
        """A sample to look at; it is not used up."""
        return self._samples.first()

    def index(self, number: int) -> int:
        """Global index of the first sample of update `number`."""
        return self._first + (number - self._number) * self.samples

    def state(self) -> Mapping[str, Any] | None:
        """What a checkpoint keeps of the source; the same on every rank between updates."""
        return self._samples.state()

    def resume(self, number: int, first: int, state: Mapping[str, Any] | None) -> None:
        """Continue with update `number` at the sample with global index `first`, whatever an update's size was."""
        self._number, self._first = number, first
        self._samples.resume(first, state)

    def _slots(self, micro_batch: int) -> range:
        first = (micro_batch * self._world + self._rank) * self._micro
        return range(first, first + self._micro)


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
