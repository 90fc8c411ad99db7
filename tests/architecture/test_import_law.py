"""The import law: which package may import what, and where the engine and the registry may meet."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY, Source, imports, read, write_tree


def _all_of(*names: str) -> str:
    return rf"({'|'.join(names)})(\..+)?"


_LIBRARIES = _all_of("torch", "pluggy", "entrypoints", "attrs", "cattrs", "tomli", "click", "rich", "safetensors")
_FACE = r"dsx\.(contracts|plugin|errors)"
_OPERATIONS = r"dsx_kernels(\.\w+(\.ops)?)?"
_FOREIGN = r"(?!dsx(_\w+)?(\.|$)).+"

LAW: Mapping[str, str] = {
    _all_of(r"dsx\.testing"): rf"{_LIBRARIES}|pytest",
    _all_of("dsx"): _LIBRARIES,
    _all_of("dsx_kernels"): rf"{_all_of('torch', 'triton', 'cupy', 'cupyx', 'entrypoints')}|dsx\.errors",
    _all_of("dsx_deepspeed", "dsx_hf", "dsx_lightning"): rf"dsx|{_FACE}|{_OPERATIONS}|{_FOREIGN}",
    _all_of(r"dsx_\w+"): rf"{_FACE}|{_OPERATIONS}|{_FOREIGN}",
}
"""What modules may import besides the standard library and their own package; the first row that fits counts."""

REGISTRY = frozenset({"dsx.registry", "dsx.resolve", "dsx.hooks", "dsx.entries", "pluggy", "entrypoints"})
"""What knows of plugins."""

SEE_BOTH = _all_of(r"dsx\.start", r"dsx\.plan\.rehearsal", r"dsx\.cli\.(run|explain|plugins)", r"dsx\.testing")


def breaches(root: Path) -> list[str]:
    """Imports that the law does not allow."""
    sources = read(root)
    found = []
    for source in sources.values():
        allowed = next((law for package, law in LAW.items() if re.fullmatch(package, source.name)), None)
        for entry in imports(source, sources):
            top = entry.target.partition(".")[0]
            if top == source.name.partition(".")[0] or top in sys.stdlib_module_names:
                continue
            if allowed is None or not re.fullmatch(allowed, entry.target):
                found.append(f"{source.place}:{entry.line}: {source.name} may not import {entry.target}")
    return found


def engine_paths(root: Path) -> list[str]:
    """Ways from the engine to what knows of plugins, each as a chain of imports; typing alone does not count."""
    sources = read(root)
    came: dict[str, str] = {"dsx.engine": ""}
    queue = deque(came)
    while queue:
        name = queue.popleft()
        for target in _reached(sources[name], sources) if name in sources else ():
            if target not in came:
                came[target] = name
                queue.append(target)
    return [_chain(came, name) for name in sorted(REGISTRY & came.keys())]


def _reached(source: Source, sources: Mapping[str, Source]) -> set[str]:
    """What an import of a module may bring with it: its imports, and the packages around those."""
    targets = {entry.target for entry in imports(source, sources) if entry.moment != "typing"}
    parts = [target.split(".") for target in targets]
    return {".".join(names[:stop]) for names in parts for stop in range(1, len(names) + 1)}


def _chain(came: Mapping[str, str], name: str) -> str:
    chain = [name]
    while came[chain[0]]:
        chain.insert(0, came[chain[0]])
    return " -> ".join(chain)


def meetings(root: Path) -> list[str]:
    """Modules that import both the engine and what knows of plugins, and are not meant to."""
    sources = read(root)
    found = []
    for source in sources.values():
        targets = {entry.target for entry in imports(source, sources) if entry.moment != "typing"}
        registry = sorted(targets & REGISTRY)
        if "dsx.engine" in targets and registry and not re.fullmatch(SEE_BOTH, source.name):
            found.append(f"{source.place}: sees both dsx.engine and {', '.join(registry)}")
    return found


def test_every_import_is_allowed() -> None:
    assert breaches(REPOSITORY) == []


def test_engine_cannot_reach_the_registry() -> None:
    assert engine_paths(REPOSITORY) == []


def test_engine_and_registry_meet_in_one_place() -> None:
    assert meetings(REPOSITORY) == []


@pytest.mark.parametrize(
    ("place", "text", "target"),
    [
        ("core/dsx/a.py", "import numpy", "numpy"),
        ("core/dsx/a.py", "def f():\n    import transformers", "transformers"),
        ("core/dsx/a.py", "import importlib\nimportlib.import_module('dsx_zero.three')", "dsx_zero.three"),
        ("core/dsx/a.py", "from dsx_kernels.adam.ops import adam", "dsx_kernels.adam.ops"),
        ("core/dsx/a.py", "import pytest", "pytest"),
        ("plugins/dsx_a/b.py", "from dsx.engine import Engine", "dsx.engine"),
        ("plugins/dsx_a/b.py", "from dsx import engine", "dsx.engine"),
        ("plugins/dsx_a/b.py", "import dsx", "dsx"),
        ("plugins/dsx_a/b.py", "from dsx.contracts.data import Unit", "dsx.contracts.data"),
        ("plugins/dsx_a/b.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dsx_c", "dsx_c"),
        ("plugins/dsx_a/b.py", "from dsx_kernels.adam.reference import adam", "dsx_kernels.adam.reference"),
        ("plugins/dsx_hf/b.py", "import dsx.build", "dsx.build"),
        ("kernels/dsx_kernels/adam/ops.py", "from dsx.contracts import Hyper", "dsx.contracts"),
        ("kernels/dsx_kernels/adam/ops.py", "import dsx_optimizers.adamw", "dsx_optimizers.adamw"),
        ("kernels/dsx_kernels/adam/ops.py", "import numpy", "numpy"),
        ("plugins/stray/b.py", "import torch", "torch"),
    ],
)
def test_a_breach_is_found(tmp_path: Path, place: str, text: str, target: str) -> None:
    root = write_tree(tmp_path, {"core/dsx/engine.py": "", "core/dsx/contracts/data.py": "", place: text})
    (found,) = breaches(root)
    assert found.startswith(place)
    assert found.endswith(f"may not import {target}")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("core/dsx/testing/kit.py", "import pytest\nfrom torch import nn"),
        ("plugins/dsx_a/b.py", "import numpy\nfrom dsx.contracts import Rule\nfrom dsx_a.c import d\nfrom . import e"),
        ("plugins/dsx_a/b.py", "import dsx_kernels\nfrom dsx_kernels.adam import adam\nimport dsx_kernels.adam.ops"),
        ("plugins/dsx_hf/b.py", "import dsx\nimport transformers"),
        ("kernels/dsx_kernels/adam/triton_forward.py", "import triton.language as tl\nfrom dsx.errors import DsxError"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, place: str, text: str) -> None:
    assert breaches(write_tree(tmp_path, {place: text})) == []


def test_a_way_to_the_registry_is_shown(tmp_path: Path) -> None:
    files = {
        "core/dsx/engine.py": "from dsx.parts.one import a",
        "core/dsx/parts/one.py": "",
        "core/dsx/parts/__init__.py": "def late():\n    from dsx import hooks",
        "core/dsx/hooks.py": "import pluggy",
    }
    assert engine_paths(write_tree(tmp_path, files)) == [
        "dsx.engine -> dsx.parts -> dsx.hooks",
        "dsx.engine -> dsx.parts -> dsx.hooks -> pluggy",
    ]


def test_a_second_meeting_is_found(tmp_path: Path) -> None:
    text = "from dsx import registry\nfrom dsx.engine import Engine"
    files = {"core/dsx/engine.py": "", "core/dsx/registry.py": "", "core/dsx/start.py": text, "core/dsx/other.py": text}
    assert meetings(write_tree(tmp_path, files)) == ["core/dsx/other.py: sees both dsx.engine and dsx.registry"]
