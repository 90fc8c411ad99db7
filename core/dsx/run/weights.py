"""The weights of a finished run as one safetensors file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from dsx.engine import Engine
from dsx.units import plain


def save_weights(engine: Engine, path: Path) -> None:
    """Write every authoritative weight and buffer under its first name; entered by all ranks, written by rank 0.

    Other names of tied weights are in the file's metadata, under "tied": {name: first name}. The file appears whole or
    not at all.
    """
    writes = engine.program.transport.rank == 0
    tensors: dict[str, Tensor] = {}
    for name, tensor in engine.weights():
        if writes:
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    if not writes:
        return
    model = plain(engine.model)
    persistent = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[name] = buffer.detach().cpu().contiguous().clone()
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    tied = {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}
    temporary = path.with_name(f"{path.name}.tmp")
    save_file(tensors, temporary, {"format": "pt", "tied": json.dumps(tied)})
    with open(temporary, "rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)
