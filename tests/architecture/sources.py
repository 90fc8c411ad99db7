"""The Python sources of a repository, parsed: its modules, and what each of them imports, where and when."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal

from attrs import frozen

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("core", "plugins", "kernels")

Moment = Literal["load", "call", "typing"]
"""When an import happens: as the module loads, when a function is called, or never but for type checkers."""


@frozen(eq=False)
class Source:
    """One module.

    name    as it is imported, e.g. "dsx.contracts.data"
    folder  "core", "plugins" or "kernels"
    place   its file, from the repository's root
    """

    name: str
    folder: str
    place: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The package in which its relative imports start: itself for an __init__.py."""
        return self.name if self.place.endswith("/__init__.py") else self.name.rpartition(".")[0]


@frozen
class Import:
    """One import: the module that is asked for, the line, and when it happens."""

    target: str
    line: int
    moment: Moment


def read(root: Path) -> dict[str, Source]:
    """Every module in the three folders of a repository, by name; templates of plugins are none."""
    sources = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            if "_template" in parts:
                continue
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text("utf-8")
            place = path.relative_to(root).as_posix()
            sources[name] = Source(name, folder, place, text, ast.parse(text, place))
    return sources


def imports(source: Source, known: Collection[str]) -> Iterator[Import]:
    """Everything a module imports, in functions too, and by a literal name given to `import_module`.

    known  names of modules: `from a import b` asks for `a.b` where that is one, else for `a`
    """
    yield from _imports(source.tree, source, known, "load")


def _imports(node: ast.AST, source: Source, known: Collection[str], moment: Moment) -> Iterator[Import]:
    for target in _targets(node, source, known):
        yield Import(target, getattr(node, "lineno", 0), moment)
    inside: Moment = "call" if moment == "load" and isinstance(node, _FUNCTIONS) else moment
    for child in ast.iter_child_nodes(node):
        typing = isinstance(node, ast.If) and _is_type_checking(node.test) and child in node.body
        yield from _imports(child, source, known, "typing" if typing else inside)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _targets(node: ast.AST, source: Source, known: Collection[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            package = source.package.split(".")
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [base])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in known else base
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("import_module", "__import__") and isinstance(node.args[0].value, str):
            yield node.args[0].value


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """A repository of a few files, for tests that show a broken law being found; every package gets its __init__.py."""
    for place, text in files.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        for folder in [*path.relative_to(root).parents][:-2]:
            (root / folder / "__init__.py").touch()
        path.write_text(text, "utf-8")
    return root
