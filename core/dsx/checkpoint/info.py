"""What of a checkpoint is no tensor: one JSON file, with a checksum of itself and of the files beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsx.errors import CheckpointError

FORMAT = 1
INFO = "dsx.json"


def read_info(path: Path) -> dict[str, Any]:
    """What of a checkpoint is no tensor, verified. Raises `CheckpointError` for anything but a whole checkpoint."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint '{path}'")
    try:
        text = (path / INFO).read_text("utf-8")
    except FileNotFoundError:
        raise CheckpointError(
            f"'{path}' is no checkpoint of dsx, or one that was never finished", expected=f"a file {INFO} in it"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"'{path / INFO}' cannot be read: {error}") from error
    try:
        info: dict[str, Any] = json.loads(text)
        found = info.pop("digest")
        whole = found == digest(canonical(info))
        version = info["format"]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"'{path / INFO}' is damaged") from None
    if not whole:
        raise CheckpointError(f"'{path / INFO}' is damaged: its checksum does not match")
    if version > FORMAT:
        raise CheckpointError(
            f"'{path}' was written by a newer dsx", expected=f"format {FORMAT} or older", found=f"format {version}"
        )
    for name, expected in info["files"].items():
        if not (path / name).is_file():
            raise CheckpointError(f"the checkpoint lacks its file {name}", where=str(path))
        if digest((path / name).read_bytes()) != expected:
            raise CheckpointError(f"the file {name} of the checkpoint is damaged", where=str(path))
    return info


def canonical(body: Mapping[str, Any]) -> bytes:
    """The bytes that a checksum of `body` is made of."""
    return json.dumps(body, sort_keys=True).encode()


def digest(data: bytes) -> str:
    """SHA-256."""
    return hashlib.sha256(data).hexdigest()
