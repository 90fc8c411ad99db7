"""What plugin authors meet has docstrings, and every module says what it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from architecture.sources import REPOSITORY, Source, read, write_tree

FACE = ("dsx.contracts", "dsx.plugin", "dsx.errors")

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def undocumented(root: Path) -> list[str]:
    """Modules with code and no docstring; in the face of dsx, public classes, functions and methods without one too.

    A method that takes the place of a documented one of a base class has that one's. A property is a field, of which
    the class's docstring and the type speak.
    """
    sources = read(root)
    found = [f"{source.place}: no docstring" for source in sources.values() if _is_silent(source)]
    face = [source for name, source in sources.items() if name.startswith(FACE)]
    classes = {node.name: node for source in face for node in source.tree.body if isinstance(node, ast.ClassDef)}
    for source in face:
        for node in _public(source.tree):
            if ast.get_docstring(node) is None:
                found.append(f"{source.place}:{node.lineno}: {node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                found += [
                    f"{source.place}:{method.lineno}: {node.name}.{method.name} has no docstring"
                    for method in _public(node)
                    if not _is_property(method) and not _is_told(node, method.name, classes)
                ]
    return found


def _is_silent(source: Source) -> bool:
    return bool(source.tree.body) and ast.get_docstring(source.tree) is None


def _public(node: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    for child in node.body:
        if isinstance(child, Definition) and not child.name.startswith("_"):
            yield child


def _is_property(node: Definition) -> bool:
    return any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)


def _is_told(node: ast.ClassDef, name: str, classes: Mapping[str, ast.ClassDef]) -> bool:
    for child in node.body:
        if isinstance(child, Definition) and child.name == name and ast.get_docstring(child) is not None:
            return True
    bases = [classes.get(ast.unparse(base).partition("[")[0]) for base in node.bases]
    return any(_is_told(base, name, classes) for base in bases if base is not None)


def test_everything_public_is_documented() -> None:
    assert undocumented(REPOSITORY) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "a.py: no docstring"),
        ('"""Doc."""\ndef f(): ...', "f has no docstring"),
        ('"""Doc."""\nclass A: ...', "A has no docstring"),
        ('"""Doc."""\nclass A:\n    """Doc."""\n    def f(self): ...', "A.f has no docstring"),
        ('"""Doc."""\nclass A(dict):\n    """Doc."""\n    def get(self): ...', "A.get has no docstring"),
    ],
)
def test_what_lacks_a_docstring_is_found(tmp_path: Path, text: str, words: str) -> None:
    (found,) = undocumented(write_tree(tmp_path, {"core/dsx/contracts/a.py": text}))
    assert found.endswith(words)


def test_a_plugin_module_without_a_docstring_is_found(tmp_path: Path) -> None:
    text = "from __future__ import annotations\ndef f(): ..."
    assert undocumented(write_tree(tmp_path, {"plugins/dsx_a/b.py": text})) == ["plugins/dsx_a/b.py: no docstring"]


def test_a_base_class_speaks_for_its_heirs(tmp_path: Path) -> None:
    base = '"""Doc."""\nclass A:\n    """Doc."""\n    def f(self):\n        """Doc."""\n'
    heir = '"""Doc."""\nclass B(A):\n    """Doc."""\n    def f(self): ...\n    @property\n    def x(self): ...\n'
    files = {"core/dsx/contracts/a.py": base, "core/dsx/contracts/b.py": heir}
    assert undocumented(write_tree(tmp_path, files)) == []
