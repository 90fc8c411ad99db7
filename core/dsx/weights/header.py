"""What a safetensors file begins with: 8 bytes of length, then names, dtypes, shapes and places of tensors as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen

from dsx.errors import CheckpointError

# In the order of their alignment: files hold the widest first, so that every tensor starts at a multiple of its own.
_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_WIDTH = {dtype: place for place, dtype in enumerate(_NAMES)}


@frozen
class Spec:
    """A tensor before its values are there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header(specs: Sequence[Spec], metadata: Mapping[str, str]) -> tuple[bytes, Mapping[str, int]]:
    """(what the file begins with, where in the file each tensor starts); the same bytes for the same arguments.

    Tensors follow one another by dtype, the widest first, then by name, without gaps, as in the library's own files.
    Raises `CheckpointError` for a dtype that the format does not have.
    """
    for spec in specs:
        if spec.dtype not in _NAMES:
            raise CheckpointError(f"'{spec.name}' is {spec.dtype}, which safetensors does not have")
    ordered = sorted(specs, key=lambda spec: (-_WIDTH[spec.dtype], spec.name))
    body: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    starts, at = {}, 0
    for spec in ordered:
        places = [at, at + spec.nbytes]
        body[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": places}
        starts[spec.name], at = at, at + spec.nbytes
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    whole = len(text).to_bytes(8, "little") + text
    return whole, {name: len(whole) + start for name, start in starts.items()}
