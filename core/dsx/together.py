"""An error of one rank becomes the same error on all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

import torch

from dsx.contracts import Transport
from dsx.errors import CheckpointError, DsxError

_BYTES = 4096
_FIELDS = ("what", "where", "expected", "found", "remedy")

T = TypeVar("T")


def together(
    transport: Transport, device: torch.device, work: Callable[[], T], kind: type[DsxError] = CheckpointError
) -> T:
    """Do `work` on every rank; if it fails on any, every rank raises the error of the first that failed.

    Raises an error of `kind` with that rank's words; a rank's own exception is its cause there.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    mine = torch.tensor(list(_packed(failure).ljust(_BYTES, b"\0")), dtype=torch.uint8, device=device)
    every = torch.empty(_BYTES * transport.world, dtype=torch.uint8, device=device)
    transport.all_gather(every, mine, channel="admin", purpose="admin").wait()
    for rank, row in enumerate(every.view(transport.world, _BYTES).cpu()):
        packed = bytes(row.tolist()).rstrip(b"\0")
        if packed:
            raise _unpacked(packed, rank, transport.world, kind) from failure
    return result  # type: ignore[return-value]


def _packed(failure: Exception | None) -> bytes:
    """A failure in at most `_BYTES` bytes; b"" for none."""
    if failure is None:
        return b""
    if not isinstance(failure, DsxError):
        failure = DsxError(f"{type(failure).__name__}: {failure}")
    texts = {name: str(text) for name in _FIELDS if (text := getattr(failure, name)) is not None}
    packed, room = json.dumps(texts).encode(), 800
    while len(packed) > _BYTES:
        packed, room = json.dumps({name: text[:room] for name, text in texts.items()}).encode(), room // 2
    return packed


def _unpacked(packed: bytes, rank: int, world: int, kind: type[DsxError]) -> DsxError:
    fields: dict[str, str] = json.loads(packed)
    if world > 1:
        fields["where"] = f"{fields['where']}, on rank {rank}" if "where" in fields else f"rank {rank}"
    return kind(fields.pop("what"), **fields)
