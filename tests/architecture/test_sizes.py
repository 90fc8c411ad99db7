"""Files and functions stay small enough to be read at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY, read, write_tree

FILE = 400
FUNCTION: Mapping[str, int] = {"core": 60, "plugins": 60, "kernels": 100}
"""Lines by folder, docstrings left out: what explains a function does not make it long. A kernel is a long formula."""


def oversized(root: Path) -> list[str]:
    """Files and functions beyond the limits."""
    found = []
    for source in read(root).values():
        lines = source.text.count("\n")
        if lines >= FILE:
            found.append(f"{source.place}: {lines} lines, under {FILE} wanted")
        for function, length in _functions(source.tree):
            if length >= FUNCTION[source.folder]:
                found.append(
                    f"{source.place}:{function.lineno}: {function.name} has {length} lines, "
                    f"under {FUNCTION[source.folder]} wanted"
                )
    return found


def _functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                docstring = node.body[0]
                assert docstring.end_lineno is not None
                length -= docstring.end_lineno - docstring.lineno + 1
            yield node, length


def test_files_and_functions_are_small() -> None:
    assert oversized(REPOSITORY) == []


@pytest.mark.parametrize(
    ("place", "text", "words"),
    [
        ("core/dsx/a.py", "x = 1\n" * 400, "400 lines, under 400 wanted"),
        ("plugins/dsx_a/b.py", "def f():\n" + "    x = 1\n" * 59, "f has 60 lines, under 60 wanted"),
        ("kernels/dsx_kernels/a.py", "class A:\n    def f(self):\n" + "        x = 1\n" * 99, "under 100 wanted"),
    ],
)
def test_what_is_too_long_is_found(tmp_path: Path, place: str, text: str, words: str) -> None:
    (found,) = oversized(write_tree(tmp_path, {place: text}))
    assert found.startswith(place)
    assert words in found


def test_a_docstring_makes_no_function_long(tmp_path: Path) -> None:
    text = 'def f():\n    """' + "Words.\n" * 100 + '    """\n    return 1\n'
    assert oversized(write_tree(tmp_path, {"core/dsx/a.py": text})) == []
