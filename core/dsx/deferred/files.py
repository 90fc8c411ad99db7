"""Weights in safetensors, read one at a time: a file, a folder with one, or a folder with an index of several."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dsx.errors import DsxError

INDEX = "model.safetensors.index.json"
_SHOWN = 10

Read = Callable[[str], Tensor]
"""The tensor of a name, as a view of the mapped file."""


class WeightFiles:
    """What is in the files.

    shapes  by name
    tied    other name -> the name in `shapes` under which its values are
    Raises `DsxError` for what is not there, or is no safetensors file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._homes: dict[str, Path] = {}
        self.shapes: dict[str, torch.Size] = {}
        self.tied: dict[str, str] = {}
        for file in _files(self.path):
            with _opened(file) as content:
                for name in content.keys():  # noqa: SIM118 -- no mapping
                    self._homes[name] = file
                    self.shapes[name] = torch.Size(content.get_slice(name).get_shape())
                self.tied.update(_tied(content.metadata() or {}))
        self.tied = {name: first for name, first in self.tied.items() if first in self.shapes}

    def places(self, names: Sequence[str]) -> list[str]:
        """Under which names of the files the values of something with these names are; each once."""
        found = (name if name in self.shapes else self.tied.get(name) for name in names)
        return list(dict.fromkeys(name for name in found if name is not None))

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """Files are mapped while the context lasts, and their pages count as this process's memory."""
        with ExitStack() as stack:
            contents: dict[Path, Any] = {}

            def read(name: str) -> Tensor:
                file = self._homes[name]
                if file not in contents:
                    contents[file] = stack.enter_context(_opened(file))
                tensor: Tensor = contents[file].get_tensor(name)
                return tensor

            yield read
            contents.clear()


def _files(path: Path) -> Sequence[Path]:
    if path.is_file():
        return [path]
    index = path / INDEX
    if index.is_file():
        try:
            return sorted({path / name for name in json.loads(index.read_text("utf-8"))["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise DsxError("the index of the weights cannot be read", where=str(index), found=repr(error)) from error
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        raise DsxError(
            "there are no weights to start from" if not found else "it is not clear which file has the weights",
            where=str(path),
            expected=f"a .safetensors file, or a folder with one or with {INDEX}",
            found=", ".join(file.name for file in found[:_SHOWN]) or ("no such file" if not path.exists() else "none"),
        )
    return found


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        content = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise DsxError("the weights cannot be read", where=str(file), found=str(error)) from error
    with content:
        yield content


def _tied(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Other names of tied weights: as a table under "tied", or each on its own, as `safetensors.torch.save_model`
    writes them."""
    for name, text in metadata.items():
        if name == "tied" and text.startswith("{"):
            yield from json.loads(text).items()
        else:
            yield name, text


def refuse_misfits(files: WeightFiles, wanted: Mapping[tuple[str, ...], torch.Size]) -> None:
    """Compare names and shapes with those of a model; `DsxError` with everything that does not fit.

    wanted  all names of a tensor -> its shape
    """
    missing: list[str] = []
    misshapen: list[str] = []
    used: set[str] = set()
    for names, shape in wanted.items():
        places = files.places(names)
        used.update(places, names)
        if not places:
            missing.append(names[0])
        misshapen += [
            f"{place} is {list(files.shapes[place])}, not {list(shape)}"
            for place in places
            if files.shapes[place] != shape
        ]
    unexpected = [name for name in files.shapes if name not in used]
    problems = {"missing": _with_near(missing, unexpected), "unexpected": unexpected, "misshapen": misshapen}
    if any(problems.values()):
        raise DsxError(
            "the weights do not fit the model",
            where=str(files.path),
            found="; ".join(f"{kind}: {listed(names)}" for kind, names in problems.items() if names),
            remedy="build the model they were saved from, or rename them in the file",
        )


def _with_near(missing: Sequence[str], others: Sequence[str]) -> list[str]:
    """Each with the name in the files that it may be a misspelling of; only where they will be shown."""
    near = [difflib.get_close_matches(name, others, 1) for name in missing[:_SHOWN]]
    said = [f"{name} (is it '{found[0]}'?)" if found else name for name, found in zip(missing, near, strict=False)]
    return [*said, *missing[_SHOWN:]]


def listed(names: Sequence[str]) -> str:
    """The first names, for a message."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
