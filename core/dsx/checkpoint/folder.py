"""One checkpoint: written under a temporary name, then renamed, so that it is there whole or not at all.

dsx.json        what is no tensor, and checksums of the files below
.metadata       the index of tensors, as torch.distributed.checkpoint writes it
__R_0.distcp    tensors that rank R wrote
__R.sums.json   their checksums
"""

from __future__ import annotations

import json
import os
import shutil
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dsx.checkpoint.content import Content, generators, numbers, restore_generators, restore_numbers
from dsx.checkpoint.disk import sync_folder, write_synced
from dsx.checkpoint.info import FORMAT, INFO, canonical, digest, read_info
from dsx.checkpoint.storage import METADATA, Reader, Writer, read_metadata, sums_name
from dsx.checkpoint.together import roll_call, together
from dsx.engine import Engine
from dsx.errors import CheckpointError

ROLL_CALL_S = 60.0


@frozen
class Loaded:
    """What `load` found.

    world  ranks that wrote it
    extra  what was given to `save`
    local  what this rank gave to `save`; {} if there were fewer ranks
    notes  for people: what the checkpoint does not have and starts anew
    """

    world: int
    extra: Mapping[str, Any]
    local: Mapping[str, Tensor]
    notes: tuple[str, ...] = field(default=())


def save(
    engine: Engine,
    path: Path,
    *,
    extra: Mapping[str, Any] | None = None,
    local: Mapping[str, Tensor] | None = None,
    timeout_s: float = ROLL_CALL_S,
) -> None:
    """Write a checkpoint of `engine` to the folder `path`; entered by all ranks.

    extra  JSON of the caller's, the same on all ranks
    local  tensors of this rank's own, by name
    Raises the same `CheckpointError` on every rank if it fails on any, leaving no trace; `RankMismatch` naming ranks
    that have not called it within `timeout_s`.
    """
    transport = engine.program.transport
    device = _device(engine)
    roll_call(transport, f"saving '{path}'", timeout_s)
    first, temporary = transport.rank == 0, path.with_name(f"{path.name}.tmp")
    engine.quiesce()
    content = Content(engine)
    try:
        together(transport, device, lambda: _make(temporary) if first else None)
        tensors: dict[str, Any] = {entry.key: entry.saved for entry in content.entries() if entry.saved is not None}
        if first:
            tensors |= content.buffers()
        mine = {**{f"generator/{name}": state for name, state in generators(device).items()}, **(local or {})}
        tensors |= {f"rank/{transport.rank}/{name}": tensor for name, tensor in mine.items()}
        together(transport, device, lambda: _write(tensors, temporary, transport.rank, transport.world))
        info = {"world": transport.world, "engine": numbers(engine), "extra": dict(extra or {})}
        together(transport, device, lambda: _publish(temporary, path, info) if first else None)
    except CheckpointError:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        content.release(changed=False)


def load(engine: Engine, path: Path, timeout_s: float = ROLL_CALL_S) -> Loaded:
    """Continue from the checkpoint in the folder `path`; entered by all ranks, of any number.

    Raises the same `CheckpointError` on every rank for a folder that is no checkpoint, is partial, damaged or newer
    than this dsx, or does not fit the model; the engine must not be used then.
    """
    transport, device = engine.program.transport, _device(engine)
    roll_call(transport, f"loading '{path}'", timeout_s)
    engine.quiesce()
    content = Content(engine)
    try:
        info = together(transport, device, lambda: read_info(path))
        plan = together(transport, device, lambda: _Plan(engine, content, path))
        together(transport, device, lambda: _read(plan.tensors, path, info, transport.world))
    finally:
        content.release(changed=True)
    content.restored()
    restore_numbers(engine, info["engine"])
    prefix = f"rank/{transport.rank}/"
    local = {key.removeprefix(prefix): tensor for key, tensor in plan.local.items()}
    states = {key.removeprefix("generator/"): tensor for key, tensor in local.items() if key.startswith("generator/")}
    notes = list(plan.notes)
    if states:
        restore_generators(states, device)
    else:
        notes.append(f"rank {transport.rank} did not exist: its random generators start from the seed")
    kept = {key: tensor for key, tensor in local.items() if not key.startswith("generator/")}
    return Loaded(info["world"], info["extra"], kept, tuple(notes))


class _Plan:
    """What is read into what."""

    def __init__(self, engine: Engine, content: Content, path: Path) -> None:
        index = read_metadata(path).state_dict_metadata
        self.tensors: dict[str, Any] = {}
        self.notes: list[str] = []
        missing: dict[str, int] = {}
        known: set[str] = set()
        for entry in content.entries():
            state, _, name = entry.key.partition("/")
            if entry.key not in index:
                if state == "weight":
                    raise CheckpointError(f"the checkpoint has no parameter '{name}'", where=str(path))
                missing[state] = missing.get(state, 0) + 1
            elif entry.held is not None:
                _check_shape(name, index[entry.key], entry.held.shape, path)
                self.tensors[entry.key] = entry.held
            known.add(entry.key)
        self.notes += [
            f"'{state}' of {count} parameters is not in the checkpoint: it starts anew"
            for state, count in missing.items()
        ]
        surplus = sorted(key for key in index if key.startswith("weight/") and key not in known)
        if surplus:
            name = surplus[0].removeprefix("weight/")
            raise CheckpointError(f"the checkpoint has a parameter '{name}', which the model has not", where=str(path))
        self.tensors |= {key: buffer for key, buffer in content.buffers().items() if key in index}
        prefix = f"rank/{engine.program.transport.rank}/"
        self.local = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in index.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        self.tensors |= self.local


def _check_shape(name: str, entry: Any, shape: torch.Size, path: Path) -> None:
    if entry.size != shape:
        raise CheckpointError(
            f"the parameter '{name}' has another shape in the checkpoint",
            where=str(path),
            expected=str(list(shape)),
            found=str(list(entry.size)),
        )


def _device(engine: Engine) -> torch.device:
    return next(engine.model.parameters()).device


def _make(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"'{temporary}' cannot be made: {error.strerror}") from error


def _write(tensors: Mapping[str, Any], folder: Path, rank: int, world: int) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as write

    try:
        with _quiet():
            write(dict(tensors), storage_writer=Writer(folder, rank), no_dist=world == 1)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise _own(error, f"the checkpoint cannot be written to '{folder.parent}'") from error


def _read(tensors: Mapping[str, Any], folder: Path, info: Mapping[str, Any], world: int) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load as read

    try:
        with _quiet():
            read(dict(tensors), storage_reader=Reader(folder, _sums(folder, info)), no_dist=world == 1)
    except (Exception, CheckpointException) as error:
        raise _own(error, "the checkpoint cannot be read") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """torch warns in one process even where it is told that there is one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _own(error: BaseException, what: str) -> CheckpointError:
    """The first rank's failure inside torch's wrapper, in words."""
    failures = getattr(error, "failures", None) or {0: (error, None)}
    cause = failures[min(failures)][0]
    if isinstance(cause, CheckpointError):
        return cause
    inner = next((e for e in _chain(cause) if isinstance(e, OSError)), cause)
    words = inner.strerror if isinstance(inner, OSError) and inner.strerror else str(inner)
    return CheckpointError(f"{what}: {words.strip().splitlines()[0] if words.strip() else type(inner).__name__}")


def _chain(error: BaseException) -> list[BaseException]:
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


def _publish(temporary: Path, path: Path, info: dict[str, Any]) -> None:
    files = [METADATA, *(sums_name(rank) for rank in range(info["world"]))]
    body = {
        "format": FORMAT,
        "time_ns": time.time_ns(),
        "torch": torch.__version__,
        "files": {name: digest((temporary / name).read_bytes()) for name in files if (temporary / name).exists()},
        **info,
    }
    try:
        write_synced(temporary / INFO, json.dumps({**body, "digest": digest(canonical(body))}, indent=1))
        sync_folder(temporary)
        if path.exists():
            replaced = path.with_name(f".{path.name}.deleting")
            shutil.rmtree(replaced, ignore_errors=True)
            os.rename(path, replaced)
            os.rename(temporary, path)
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            os.rename(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written to '{path.parent}': {error.strerror}") from error


def _sums(folder: Path, info: Mapping[str, Any]) -> dict[tuple[str, int, int], int]:
    found = {}
    for rank in range(info["world"]):
        path = folder / sums_name(rank)
        for file, items in (json.loads(path.read_text("utf-8")) if path.exists() else {}).items():
            found.update({(file, offset, length): crc for offset, length, crc in items})
    return found
