"""The weights of a finished run as one safetensors file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from dsx.checkpoint.disk import sync_folder, writing
from dsx.engine import Engine
from dsx.together import together
from dsx.weights.live import model_of, stream
from dsx.weights.writer import File


def save_weights(engine: Engine, path: Path) -> None:
    """Write every authoritative weight and buffer under its first name; entered by all ranks, written by rank 0.

    Other names of tied weights are in the file's metadata: each with its first name, as in files of Hugging Face, and
    all of them as JSON under "tied". The file appears whole or not at all.
    Raises the same `CheckpointError` on all ranks if it cannot be written.
    """
    transport, device = engine.program.transport, next(engine.model.parameters()).device
    temporary = path.with_name(f"{path.name}.tmp")

    def begin() -> File | None:
        if transport.rank:
            return None
        model = model_of(engine)
        with writing(path):
            return File(temporary, model.specs, {**model.metadata(), "tied": json.dumps(model.about["tied"])})

    def finish(file: File | None, failure: Exception | None) -> None:
        if file is None:
            return
        file.close()
        try:
            with writing(path):
                if failure is not None:
                    raise failure
                os.replace(temporary, path)
                sync_folder(path.parent)
        except Exception:
            temporary.unlink(missing_ok=True)
            raise

    file = together(transport, device, begin)
    failure = stream(engine, file.write if file else None)
    together(transport, device, lambda: finish(file, failure))
