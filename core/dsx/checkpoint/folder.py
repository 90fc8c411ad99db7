"""One checkpoint: written under a temporary name, then renamed, so that it is there whole or not at all.

dsx.json        what is no tensor, and checksums of the files below
.metadata       the index of tensors, as torch.distributed.checkpoint writes it
__R_0.distcp    tensors that rank R wrote
__R.sums.json   their checksums
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from dsx.checkpoint.content import Content, generators, numbers, restore_generators, restore_numbers
from dsx.checkpoint.description import describe_model
from dsx.checkpoint.disk import replace_folder, sync_folder, write_synced
from dsx.checkpoint.info import FORMAT, INFO, canonical, digest, read_info
from dsx.checkpoint.resize import read_means
from dsx.checkpoint.storage import METADATA, Reader, Writer, read_sums, sums_name
from dsx.checkpoint.wanted import Wanted
from dsx.contracts import Transport
from dsx.engine import Engine
from dsx.errors import CheckpointError
from dsx.roll_call import ROLL_CALL_S, roll_call
from dsx.together import together

_FULL = 1 << 20


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


@frozen
class Snapshot:
    """What a rank writes.

    tensors    by name; slices of the engine's own, or copies of them
    info       what is no tensor, the same on all ranks
    give_back  to be called when what was read of a slice is not needed any more
    """

    tensors: Mapping[str, Any]
    info: Mapping[str, Any]
    give_back: Callable[[], None] = lambda: None


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
    roll_call(engine.program.transport, f"saving '{path}'", timeout_s)
    with snapshot(engine, extra, local) as taken:
        write(taken, path, engine.program.transport, _device(engine))


@contextmanager
def snapshot(
    engine: Engine, extra: Mapping[str, Any] | None = None, local: Mapping[str, Tensor] | None = None
) -> Iterator[Snapshot]:
    """What `engine` would save now; its tensors are the engine's own, within the context only."""
    engine.quiesce()
    transport, content = engine.program.transport, Content(engine)
    try:
        tensors: dict[str, Any] = {entry.key: entry.saved for entry in content.entries() if entry.saved is not None}
        if transport.rank == 0:
            tensors |= content.buffers()
        states = {f"generator/{name}": state for name, state in generators(_device(engine)).items()}
        tensors |= {f"rank/{transport.rank}/{name}": tensor for name, tensor in {**states, **(local or {})}.items()}
        model = describe_model(engine.model)
        info = {"world": transport.world, "engine": numbers(engine), "model": model, "extra": dict(extra or {})}
        yield Snapshot(tensors, info, lambda: content.give_back(changed=False))
    finally:
        content.give_back(changed=False)


def write(
    taken: Snapshot, path: Path, transport: Transport, device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Write a snapshot under a temporary name and rename it; entered by all ranks of `transport`.

    group  for torch's own exchange; None: the default one
    """
    first, temporary = transport.rank == 0, path.with_name(f"{path.name}.tmp")
    try:
        together(transport, device, lambda: _make(temporary) if first else None)
        together(transport, device, lambda: _write(taken, temporary, transport, group))
        together(transport, device, lambda: _publish(temporary, path, taken.info) if first else None)
    except CheckpointError:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


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
        plan = together(transport, device, lambda: Wanted(engine, content, path, info["world"]))
        together(transport, device, lambda: _read(plan.tensors, path, info, transport.world, content))
        read_means(plan.means, path, transport, device)
    finally:
        content.give_back(changed=True)
    restore_numbers(engine, info["engine"])
    engine.settled.derive()
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


def _device(engine: Engine) -> torch.device:
    return next(engine.model.parameters()).device


def _make(temporary: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"'{temporary}' cannot be made: {error.strerror}") from error


def _write(taken: Snapshot, folder: Path, transport: Transport, group: dist.ProcessGroup | None) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

    try:
        with _quiet():
            write_tensors(
                dict(taken.tensors),
                storage_writer=Writer(folder, transport.rank, taken.give_back),
                process_group=group,
                no_dist=transport.world == 1,
            )
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        what = f"the checkpoint cannot be written to '{folder.parent}'"
        if (free := shutil.disk_usage(folder).free) < _FULL:  # torch's writer reports a full disk as a wrong position
            raise CheckpointError(
                f"{what}: No space left on device", found=f"{free} bytes free", remedy="free space, or keep fewer"
            ) from error
        raise _own(error, what) from error


def _read(tensors: Mapping[str, Any], folder: Path, info: Mapping[str, Any], world: int, content: Content) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load as read

    reader = Reader(folder, read_sums(folder, info["world"]), lambda: content.give_back(changed=True))
    try:
        with _quiet():
            read(dict(tensors), storage_reader=reader, no_dist=world == 1)
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


def _publish(temporary: Path, path: Path, info: Mapping[str, Any]) -> None:
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
        replace_folder(temporary, path)
    except OSError as error:
        raise CheckpointError(f"the checkpoint cannot be written to '{path.parent}': {error.strerror}") from error
