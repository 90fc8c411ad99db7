"""A model and data sources for tests of `dsx run`: named in manifests as "run_targets:..."."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 5


class Regression(nn.Module):
    """Least squares in float64, so that world sizes differ by rounding far below 1e-6."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inside, self.out, self.dropout = nn.Linear(WIDTH, 7), nn.Linear(7, 1), nn.Dropout(dropout)
        self.double()

    def forward(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        return (self.out(self.dropout(torch.tanh(self.inside(x)))).squeeze(1) - y).square().mean()


def sample(index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": x.sum().sin(), "index": torch.tensor(index)}


class Logged:
    """Samples by index; each one taken is noted in a file of the rank's, if there is a folder for it."""

    def __init__(self, length: int, held_out: int = 0, log: str | None = None) -> None:
        self.length, self.log = length, log
        self.held_out = [sample(1000 + number) for number in range(held_out)] if held_out else None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        _note(self.log, index)
        return sample(index)


class Mortal(Logged):
    """Its process is killed before sample number `after`, counted from its start, or, at 0, when the source is made;
    once, which a file remembers."""

    def __init__(self, length: int, after: int, memory: str) -> None:
        super().__init__(length)
        self.left, self.memory = after, Path(memory)
        if after == 0:
            self._die()

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.left -= 1
        if self.left == 0:
            self._die()
        return super().__getitem__(index)

    def _die(self) -> None:
        if not self.memory.exists():
            self.memory.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Once:
    """An iterable that ends."""

    def __init__(self, length: int, log: str | None = None) -> None:
        self.length, self.log = length, log
        self._numbers = iter(range(length))

    def __iter__(self) -> Iterator[Any]:
        for index in self._numbers:
            yield sample(index)


def _note(folder: str | None, index: int) -> None:
    if folder is not None:
        with Path(folder, os.environ.get("RANK", "0")).open("a") as file:
            file.write(f"{index}\n")


def model(dropout: float = 0.0) -> nn.Module:
    return Regression(dropout)


class Bursting(Regression):
    """The gradient of its first weight is Inf in the third update, once, also where the run is resumed."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        self.calls += 1
        self.inside.weight.register_hook(lambda gradient: gradient * float("inf")) if self.calls == 3 else None
        return super().forward(x, y, index)


def bursting() -> nn.Module:
    return Bursting()


def logged(length: int, held_out: int = 0, log: str | None = None) -> Logged:
    return Logged(length, held_out, log)


def once(length: int) -> Once:
    return Once(length)


def mortal(length: int, after: int, memory: str) -> Mortal:
    return Mortal(length, after, memory)
