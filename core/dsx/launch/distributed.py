"""Joining the default process group: the one that is there, or the launcher's, or none."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from dsx.errors import DsxError

TIMEOUT = "DSX_TIMEOUT"
_TIMEOUT_S = 600.0
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@frozen
class Ranks:
    """This process among the ranks of its run.

    rank        0 to world - 1
    world       ranks in all
    local_rank  0 to the ranks on this host - 1
    owned       whether `join` made the process group, so that `leave` destroys it
    """

    rank: int
    world: int
    local_rank: int
    owned: bool


def join(device: torch.device | None = None, timeout_s: float | None = None) -> Ranks:
    """Be part of the default process group.

    Takes the group that is there; else makes it from a launcher's environment (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT); else, where neither RANK nor WORLD_SIZE is set, is rank 0 of 1 without a group. `device` is where the
    run computes (None: CUDA if there is one): NCCL serves CUDA tensors, gloo those on the CPU. `timeout_s` bounds, in
    seconds, the wait for the other ranks, now and in every collective; None: `dsx run --timeout`, else 600.

    Raises DsxError for an environment that is incomplete or wrong, or when the others do not come.
    """
    if dist.is_available() and dist.is_initialized():
        return Ranks(dist.get_rank(), dist.get_world_size(), _local_rank(dist.get_rank()), owned=False)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return Ranks(0, 1, 0, owned=False)
    rank, world = _checked_environment()
    seconds = timeout_s or float(os.environ.get(TIMEOUT) or _TIMEOUT_S)
    try:
        dist.init_process_group(_backend(device), timeout=timedelta(seconds=seconds))
    except dist.DistError as error:
        raise DsxError(
            f"rank {rank} could not join the process group of {world}",
            where=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
            found=str(error).partition("\n")[0],
            remedy="start all ranks, each with its own RANK, and let MASTER_ADDR and MASTER_PORT reach rank 0's host",
        ) from error
    return Ranks(rank, world, _local_rank(rank), owned=True)


def leave(ranks: Ranks) -> None:
    """Destroy the process group if `join` made it and it is still there."""
    if ranks.owned and dist.is_initialized():
        dist.destroy_process_group()


def patience() -> timedelta:
    """How long a collective of the default group may take; a group made beside it does not take this over by itself."""
    group: Any = dist.group.WORLD
    for device in ("cpu", "cuda"):
        with suppress(RuntimeError, AttributeError):
            limit: timedelta = group._get_backend(torch.device(device)).options._timeout
            return limit
    return dist.default_pg_timeout


def let_go(groups: list[Any]) -> None:
    """Drop what are the last references to destroyed groups, all at once: a gloo group holds up whoever does for some
    20 ms, until its own thread has noticed."""
    threads = [Thread(target=groups.pop) for _ in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _backend(device: torch.device | None) -> str:
    on_cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    return "cpu:gloo,cuda:nccl" if on_cuda else "gloo"


def _checked_environment() -> tuple[int, int]:
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise DsxError(
            f"the environment names some of a launcher's variables, but not {', '.join(missing)}",
            where="environment",
            expected=", ".join(_VARIABLES),
            remedy="set them all, or none to run alone",
        )
    rank, world, port = (_number(name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if not 0 <= rank < world:
        raise DsxError("RANK is not below WORLD_SIZE", where="environment", found=f"RANK={rank}, WORLD_SIZE={world}")
    if port >= 1 << 16:
        raise DsxError("MASTER_PORT is not a port", where="environment", expected="0 to 65535", found=str(port))
    return rank, world


def _number(name: str) -> int:
    text = os.environ[name]
    if not text.isdecimal():
        raise DsxError(f"{name} is not a number", where="environment", expected="digits", found=repr(text))
    return int(text)


def _local_rank(rank: int) -> int:
    """What the launcher says; without one, ranks are taken to fill hosts in order, one for each device."""
    if os.environ.get("LOCAL_RANK"):
        return _number("LOCAL_RANK")
    devices = torch.cuda.device_count()
    return rank % devices if devices else rank
