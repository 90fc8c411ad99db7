"""No module needs itself in order to load."""

from __future__ import annotations

from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY, Source, imports, read, write_tree


def cycle(root: Path) -> list[str]:
    """Modules each of which imports the next as it loads, the last being the first; [] if there is no such ring."""
    sources = read(root)
    graph = {name: sorted(_needed(source, sources)) for name, source in sources.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        ring: list[str] = error.args[1]
        return ring[::-1]
    return []


def _needed(source: Source, sources: Mapping[str, Source]) -> set[str]:
    """Modules that load before this one can, packages around them too, but for those that this one is inside of."""
    needed = set()
    for entry in imports(source, sources):
        if entry.moment != "load":
            continue
        needed.add(entry.target)
        parts = entry.target.split(".")
        around = {".".join(parts[:stop]) for stop in range(1, len(parts))}
        needed |= {name for name in around if not f"{source.name}.".startswith(f"{name}.")}
    return needed & sources.keys()


def test_no_import_cycles() -> None:
    assert cycle(REPOSITORY) == []


@pytest.mark.parametrize(
    ("files", "ring"),
    [
        ({"core/dsx/a.py": "import dsx.b", "core/dsx/b.py": "from dsx import a"}, {"dsx.a", "dsx.b"}),
        ({"core/dsx/a.py": "from dsx.a import x"}, {"dsx.a"}),
        (
            {
                "core/dsx/a.py": "import dsx.p.x",
                "core/dsx/p/x.py": "",
                "core/dsx/p/__init__.py": "try:\n    from dsx.a import y\nexcept ImportError:\n    pass",
            },
            {"dsx.a", "dsx.p"},
        ),
        ({"core/dsx/p/x.py": "from dsx.p import y", "core/dsx/p/__init__.py": "import dsx.p.x"}, {"dsx.p", "dsx.p.x"}),
    ],
)
def test_a_cycle_is_found(tmp_path: Path, files: dict[str, str], ring: set[str]) -> None:
    found = cycle(write_tree(tmp_path, files))
    assert set(found) == ring
    assert found[0] == found[-1]


def test_late_and_typing_imports_make_no_cycle(tmp_path: Path) -> None:
    late = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dsx import a\ndef f():\n    import dsx.a"
    assert cycle(write_tree(tmp_path, {"core/dsx/a.py": "import dsx.b", "core/dsx/b.py": late})) == []
