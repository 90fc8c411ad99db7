"""Checkpoints written beside the training: a copy is taken at once, a thread writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsx.checkpoint.folder import Snapshot, snapshot, write
from dsx.checkpoint.lent import Values
from dsx.checkpoint.slices import Slice
from dsx.engine import Engine
from dsx.errors import CheckpointError
from dsx.roll_call import roll_call

WAIT_S = 1800.0


class Background:
    """Writes one checkpoint at a time; made and used by all ranks together.

    Its thread exchanges over a transport and a process group of its own, so it cannot take the training's messages.
    Each rank holds a copy of what it writes, in host memory, until it is written.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        transport = engine.program.transport
        self._transport = transport.split(range(transport.world)) if transport.world > 1 else transport
        self._group = dist.new_group(backend="gloo") if transport.world > 1 else None
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def save(self, path: Path, extra: Mapping[str, Any], done: Callable[[], None]) -> None:
        """Take a copy and start writing it; waits first for the one before. `done` is called once it is whole.

        Raises what the one before failed with.
        """
        roll_call(self._engine.program.transport, f"saving '{path}'", WAIT_S)
        self.wait()
        with snapshot(self._engine, extra) as taken:
            copies = {}
            for name, tensor in taken.tensors.items():
                copies[name] = _copied(tensor)
                taken.give_back()
            copy = Snapshot(copies, taken.info)
        self._thread = threading.Thread(target=self._run, args=(copy, path, done), name="dsx-checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written. Raises what it failed with, or `CheckpointError` after half an hour."""
        if self._thread is not None:
            self._thread.join(WAIT_S)
            if self._thread.is_alive():
                raise CheckpointError(f"the checkpoint written beside the training did not end within {WAIT_S:g} s")
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait, and give the transport back."""
        try:
            self.wait()
        finally:
            if self._group is not None:
                self._transport.close()
                dist.destroy_process_group(self._group)

    def _run(self, taken: Snapshot, path: Path, done: Callable[[], None]) -> None:
        try:
            write(taken, path, self._transport, self._device(), self._group)
            done()
        except Exception as error:
            self._error = error

    def _device(self) -> torch.device:
        return next(self._engine.model.parameters()).device


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """In host memory, and nobody else's."""
    if isinstance(tensor, Slice):
        return Slice(Values(tensor.held.tensor().to("cpu", copy=True)), tensor.start, tensor.shape)
    return tensor.to("cpu", copy=True)
