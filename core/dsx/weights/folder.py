"""A folder that `transformers` and `safetensors` load, which appears whole or not at all."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from dsx.checkpoint.disk import replace_folder, sync_folder, write_synced, writing
from dsx.errors import CheckpointError, near
from dsx.weights.header import Spec
from dsx.weights.writer import Files

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_OURS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|(generation_)?config\.json")
_CONFIGS = {"config": "config.json", "generation_config": "generation_config.json"}


@frozen
class Model:
    """What is to be written besides values.

    specs    tensors in the order of the model's state_dict
    about    as `describe_model` gives it; {} where nobody wrote it down
    """

    specs: Sequence[Spec]
    about: Mapping[str, Any]

    def metadata(self) -> dict[str, str]:
        """Of a safetensors file: tied weights are in it once, and this tells the other names."""
        return {**self.about.get("tied", {}), "format": "pt"}

    def cast(self, dtype: torch.dtype | None) -> Model:
        """With all floating-point tensors in `dtype`; None leaves them."""
        if dtype is None:
            return self
        specs = [evolve(spec, dtype=dtype) if spec.dtype.is_floating_point else spec for spec in self.specs]
        return evolve(self, specs=specs)

    def configs(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(file name, content) of the model's own configurations; they say what is written here, not what was built."""
        dtype = next((spec.dtype for spec in self.specs if spec.dtype.is_floating_point), None)
        for key, name in _CONFIGS.items():
            if key in self.about:
                content = dict(self.about[key])
                if "model_type" in content:
                    content["architectures"] = content.get("architectures") or [self.about["class"]]
                for word in ("dtype", "torch_dtype"):
                    if word in content and dtype is not None:
                        content[word] = str(dtype).removeprefix("torch.")
                yield name, content


@frozen
class Exported:
    """What was written.

    folder  where
    files   names in it
    tensors how many
    bytes   of their values
    """

    folder: Path
    files: tuple[str, ...]
    tensors: int
    bytes: int


class Folder:
    """`out` while it is being made, under another name.

    told  called with the number of bytes of each piece that was written

    Raises `CheckpointError` where `out` has something in it, and `overwrite` is not set or it is no earlier export.
    """

    def __init__(
        self,
        out: Path,
        model: Model,
        *,
        dtype: torch.dtype | None,
        shard_bytes: int | None,
        overwrite: bool,
        told: Callable[[int], object] = lambda size: None,
    ) -> None:
        if shard_bytes is not None and shard_bytes < 1:
            raise CheckpointError(f"shards of {shard_bytes} bytes hold nothing", expected="1 or more")
        self._out, self._model, self._told = out, model.cast(dtype), told
        self._dtypes = {spec.name: spec.dtype for spec in self._model.specs}
        self._temporary = out.with_name(f"{out.name}.tmp")
        _refuse_occupied(out, overwrite)
        with writing(out):
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(parents=True)
            self._refuse_full()
        self._files = Files(self._temporary, self._model.specs, self._model.metadata(), shard_bytes)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Elements from `start` on of a tensor, in memory order: 1-D, of any dtype, anywhere."""
        piece = values.detach().to("cpu", self._dtypes[name]).contiguous()
        with writing(self._out):
            self._files.write(name, start, piece)
        self._told(piece.numel() * piece.element_size())

    def finish(self) -> Exported:
        """Make `out` of it."""
        with writing(self._out):
            files = list(self._files.finish())
            for name, content in self._model.configs():
                write_synced(self._temporary / name, json.dumps(content, indent=2, sort_keys=True) + "\n")
                files.append(name)
            sync_folder(self._temporary)
            replace_folder(self._temporary, self._out)
        return Exported(self._out, tuple(files), len(self._model.specs), self._total())

    def abandon(self) -> None:
        """Leave no trace."""
        self._files.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _total(self) -> int:
        return sum(spec.nbytes for spec in self._model.specs)

    def _refuse_full(self) -> None:
        free = shutil.disk_usage(self._temporary).free
        if free < self._total():
            self._temporary.rmdir()
            raise CheckpointError(
                f"there is no room for '{self._out}'",
                expected=f"{self._total()} bytes free",
                found=f"{free} bytes",
                remedy="free space, or choose a narrower dtype",
            )


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype to export in, by its name or itself; None: as it is. Raises `ValueError` for others."""
    if dtype is None or dtype in DTYPES.values():
        return dtype  # type: ignore[return-value]
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        hint = near(name, DTYPES)
        raise ValueError(f"weights are exported as {', '.join(DTYPES)}, not {name}" + (f": {hint}" if hint else ""))
    return DTYPES[name]


def _refuse_occupied(out: Path, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"'{out}' is a file", expected="a folder, or a name that is free")
    found = sorted(path.name for path in out.iterdir())
    if found and not overwrite:
        raise CheckpointError(
            f"'{out}' is not empty",
            found=", ".join(found[:5]),
            remedy="choose another folder, or give --overwrite (`overwrite=True` in Python)",
        )
    others = [name for name in found if not _OURS.fullmatch(name)]
    if others:
        raise CheckpointError(
            f"'{out}' holds something that no export has written",
            found=", ".join(others[:5]),
            remedy="choose another folder: this one would be deleted",
        )
