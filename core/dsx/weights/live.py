"""Weights of an engine: one unit whole at a time, written by rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from dsx.checkpoint.description import describe_model, firsts, persistent_buffers
from dsx.checkpoint.items import PIECE
from dsx.engine import Engine
from dsx.roll_call import ROLL_CALL_S, roll_call
from dsx.together import together
from dsx.units import plain
from dsx.weights.folder import Exported, Folder, Model, dtype_of
from dsx.weights.header import Spec

Write = Callable[[str, int, Tensor], object]


def export_engine(
    engine: Engine,
    out: Path,
    dtype: torch.dtype | str | None = None,
    shard_bytes: int | None = None,
    overwrite: bool = False,
    timeout_s: float = ROLL_CALL_S,
) -> None:
    """As `dsx.export` from a checkpoint; entered by all ranks.

    Raises the same `CheckpointError` on all of them; `RankMismatch` naming ranks that have not called it within
    `timeout_s`.
    """
    wanted, transport = dtype_of(dtype), engine.program.transport
    device = next(engine.model.parameters()).device
    roll_call(transport, f"exporting to '{out}'", timeout_s)

    def begin() -> Folder | None:
        if transport.rank:
            return None
        return Folder(out, model_of(engine), dtype=wanted, shard_bytes=shard_bytes, overwrite=overwrite)

    folder = together(transport, device, begin)
    try:
        failure = stream(engine, folder.write if folder else None)
        together(transport, device, lambda: _end(folder, failure))
    except BaseException:
        if folder:
            folder.abandon()
        raise


def _end(folder: Folder | None, failure: Exception | None) -> Exported | None:
    if failure is not None:
        raise failure
    return folder.finish() if folder else None


def model_of(engine: Engine) -> Model:
    """What an export of `engine` consists of; the weights in the dtypes in which they are trained."""
    tensors = {**dict(plain(engine.model).named_parameters()), **firsts(persistent_buffers(engine.model))}
    dtypes, about = dict(_dtypes(engine)), describe_model(engine.model)
    specs = [Spec(name, tuple(tensors[name].shape), dtypes.get(name, tensors[name].dtype)) for name in about["names"]]
    return Model(specs, about)


def _dtypes(engine: Engine) -> Iterator[tuple[str, torch.dtype]]:
    program = engine.program
    for flat in (flat for unit in program.layout.units for flat in unit.flats):
        masters = "master" in program.store.names(flat.key)
        dtype = program.dtypes.master(flat.dtype, flat.source) if masters else flat.dtype
        yield from ((segment.name, dtype) for segment in flat.segments)


def stream(engine: Engine, write: Write | None) -> Exception | None:
    """Give every weight and persistent buffer to `write`, in pieces; entered by all ranks.

    Once `write` has failed the rest is passed over, since the other ranks are in it too; what it raised is returned.
    """
    failure: Exception | None = None
    for name, tensor in _tensors(engine):
        if write is not None and failure is None:
            try:
                _pieces(name, tensor, write)
            except Exception as error:
                failure = error
        del tensor  # else it would keep its unit while the next one is gathered
    return failure


def _tensors(engine: Engine) -> Iterator[tuple[str, Tensor]]:
    yield from engine.weights()
    yield from firsts(persistent_buffers(engine.model)).items()


def _pieces(name: str, tensor: Tensor, write: Write) -> None:
    flat = tensor.detach().reshape(-1)
    each = max(1, PIECE // flat.element_size())
    for start in range(0, flat.numel(), each):
        write(name, start, flat[start : start + each].to("cpu"))
