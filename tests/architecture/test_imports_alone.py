"""Each module imports alone, warnings being errors, and wakes nothing that is slow or looks for a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY, read, write_tree

PROGRAM = Path(__file__).with_name("import_alone.py")


def not_alone(root: Path) -> list[str]:
    """What goes wrong where a module of a repository is the first to be imported."""
    modules = [name for name in read(root) if not name.endswith("__main__")]
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(root), *modules], capture_output=True, text=True, timeout=400, check=True
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(modules), done.stdout
    return list(chain.from_iterable(lines))


def test_each_module_imports_alone() -> None:
    assert not_alone(REPOSITORY) == []


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    files = {
        "core/dsx/fine.py": "import torch",
        "core/dsx/wakes.py": "import triton",
        "core/dsx/leans.py": "import dsx\nx = dsx.fine.torch",
        "core/dsx/warns.py": "import warnings\nwarnings.warn('old', DeprecationWarning)",
        "core/dsx/starts.py": "import torch\ntorch.cuda._initialized = True",
        "core/dsx/ends.py": "import os\nos._exit(3)",
        "core/dsx/knows.py": "import dsx_a",
        "plugins/dsx_a/b.py": "import dsx_a",
        "kernels/triton/language.py": "",
    }
    return not_alone(write_tree(tmp_path_factory.mktemp("tree"), files))


@pytest.mark.parametrize(
    "words",
    [
        "dsx.wakes imports triton",
        "dsx.leans does not import alone: AttributeError: module 'dsx' has no attribute 'fine'",
        "dsx.warns does not import alone: DeprecationWarning: old",
        "dsx.starts starts CUDA",
        "dsx.ends ends its process: 3",
        "dsx.knows imports the plugin package dsx_a",
    ],
)
def test_a_module_that_does_more_is_found(found: list[str], words: str) -> None:
    assert words in found


def test_only_those_are_found(found: list[str]) -> None:
    assert {line.split()[0] for line in found if not line.startswith("triton")} == {
        f"dsx.{name}" for name in ("wakes", "leans", "warns", "starts", "ends", "knows")
    }
