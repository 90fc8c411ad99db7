"""Core knows no feature: neither a plugin's name nor a technique's steers it.

In core's modules, each of these is refused; docstrings, comments and prose (literals with a blank) are for people:

- a literal that is a name or a dotted key, one part of which is the name of a plugin that this distribution registers
- an attribute, or a variable in a comparison or an `isinstance`, with the name of such a plugin
- any of these with a part between underscores or dots that is a technique's word
- a comparison or `match` of a plugin's or descriptor's `name` with a literal, whatever it says
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Set
from pathlib import Path

import pytest
import tomli

from architecture.sources import REPOSITORY, read, write_tree

TECHNIQUES = frozenset({"zero1", "zero2", "zero3", "onebit", "nvme", "fp16"})

_KEY = re.compile(r"[\w.-]+")
_NAME_OF_PLUGIN = re.compile(r"(.+\.)?(plugin|descriptor|filler|registration)\.name")


def plugin_names(root: Path) -> frozenset[str]:
    """What this distribution registers in the group `dsx.plugins`."""
    project = tomli.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    return frozenset(project["entry-points"]["dsx.plugins"])


def feature_names(root: Path) -> list[str]:
    """Places in core that name a feature."""
    plugins = plugin_names(root)
    found = []
    for source in read(root).values():
        if source.folder != "core":
            continue
        prose = _docstrings(source.tree)
        for node in ast.walk(source.tree):
            for word in _words(node) if node not in prose else ():
                if _names_feature(word, plugins):
                    found.append(f"{source.place}:{_line(node)}: '{word}' names a feature")
            if _branches_on_a_plugin(node):
                found.append(f"{source.place}:{_line(node)}: branches on the name of a plugin")
    return found


def _names_feature(word: str, plugins: Set[str]) -> bool:
    return bool(set(word.split(".")) & plugins or set(re.split(r"[._-]", word)) & TECHNIQUES)


def _words(node: ast.AST) -> Iterator[str]:
    """What a node says to the interpreter: keys, attributes, and names that decide something."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and _KEY.fullmatch(node.value):
        yield node.value
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) != "torch":  # torch.strided is its own word
        yield node.attr.strip("_")
    elif isinstance(node, ast.Compare):
        yield from (side.id.lower() for side in [node.left, *node.comparators] if isinstance(side, ast.Name))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
        yield from (name.id.lower() for name in ast.walk(node.args[1]) if isinstance(name, ast.Name))


def _branches_on_a_plugin(node: ast.AST) -> bool:
    if isinstance(node, ast.Match):
        return _NAME_OF_PLUGIN.fullmatch(ast.unparse(node.subject)) is not None
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    literal = any(isinstance(inner, ast.Constant) for side in sides for inner in ast.walk(side))
    return literal and any(_NAME_OF_PLUGIN.fullmatch(ast.unparse(side)) for side in sides)


def _docstrings(tree: ast.Module) -> set[ast.AST]:
    """Strings that are statements of their own: docstrings, and words below an assignment."""
    statements = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {value for value in statements if isinstance(value, ast.Constant)}


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def test_core_names_no_feature() -> None:
    assert feature_names(REPOSITORY) == []


PROJECT = '[project.entry-points."dsx.plugins"]\nmuon = "dsx_optimizers.muon"\nwarmup_sine = "dsx_schedules.sine"\n'


@pytest.mark.parametrize(
    "text",
    [
        'rule = "muon"',
        'key = "optimize.muon.lr"',
        'table["warmup_sine"]',
        'f"{section}.muon"',
        "settings.muon",
        "if rule == muon: ...",
        "if isinstance(rule, Muon): ...",
        "if engine.zero3_enabled: ...",
        'stage = "zero1"',
        "self.fp16",
        'if "nvme-offload" in used: ...',
        'if plugin.name == "anything": ...',
        'if "a" != self.descriptor.name: ...',
        'if filler.plugin.name in ("a", "b"): ...',
        'match plugin.name:\n    case "a": ...',
    ],
)
def test_a_feature_in_core_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (found, *_) = feature_names(write_tree(tmp_path, {"core/dsx/a.py": text}))
    assert found.startswith("core/dsx/a.py:1: ")


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("core/dsx/a.py", '"""About muon, zero3 and fp16."""\nx = 1\n"""muon"""'),
        ("core/dsx/a.py", "x = 1  # as muon does"),
        ("core/dsx/a.py", 'words = "muon, or what else there is"'),
        ("core/dsx/a.py", "optimizer = torch.optim.Muon(parameters)"),
        ("core/dsx/a.py", "if tensor.layout != torch.muon: ..."),
        ("core/dsx/a.py", "if descriptor.name != entry.name: ..."),
        ("core/dsx/defaults/muon.py", "class Muon: ..."),
        ("core/dsx/a.py", "from dsx.defaults.muon import Muon\npart = Muon()"),
        ("plugins/dsx_optimizers/muon.py", 'name = "muon"'),
    ],
)
def test_what_only_people_read_passes(tmp_path: Path, place: str, text: str) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    assert feature_names(write_tree(tmp_path, {place: text})) == []
