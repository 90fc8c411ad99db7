"""State of anybody's source as JSON: nothing of a checkpoint is unpickled."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dsx.errors import CheckpointError

_KINDS = ("tensor", "bytes", "tuple", "mapping")


def encode(value: Any) -> Any:
    """Numbers, texts, None, lists, tuples, mappings, bytes and tensors as JSON. Raises `CheckpointError` for others."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
        return {"tensor": _text(bytes(flat.tolist())), "dtype": str(value.dtype), "shape": list(value.shape)}
    if isinstance(value, bytes):
        return {"bytes": _text(value)}
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {"mapping": [[encode(key), encode(item)] for key, item in value.items()]}
    raise CheckpointError(
        f"the data source's state has a {type(value).__name__}",
        where="data.source, state_dict()",
        expected="numbers, texts, None, tensors, bytes, and lists, tuples and mappings of them",
    )


def decode(value: Any) -> Any:
    """What `encode` was given."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = next(kind for kind in _KINDS if kind in value)
    held = value[kind]
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"].removeprefix("torch."))
        flat = torch.tensor(list(base64.b64decode(held)), dtype=torch.uint8)
        return flat.view(dtype).view(value["shape"])
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "tuple":
        return tuple(decode(item) for item in held)
    return {decode(key): decode(item) for key, item in held}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
