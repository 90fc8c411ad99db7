"""The blocks of a page of documentation, and what is done to each as its reader would.

a first line `# NAME.toml`, `# NAME.py`   the block is that file
```python   runs, after those above it on the page
```toml     is a part of a manifest, and must be a valid one
```sh       runs line by line; a comment `# exit code N` says how a line ends
```text     is what the block before it prints: its lines, in this order, others between them left out, `...` for
            anything, and any number of blanks for one
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import tomli
from attrs import frozen

from dsx.cli import call
from dsx.manifest import Manifest
from dsx.registry import Registry
from dsx.resolve import resolve
from unpacked import add_metadata

REPOSITORY = Path(__file__).parents[2]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_INCLUDE = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
_FILE = re.compile(r"# ([\w./-]+\.(?:py|toml|txt))\n")


@frozen
class Block:
    """A fenced block: its kind, text, and line on the page."""

    kind: str
    text: str
    line: int


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, included files in their place."""
    for found in _FENCE.finditer(page):
        text = _INCLUDE.sub(lambda name: (REPOSITORY / name[1]).read_text("utf-8").rstrip("\n"), dedent(found[3]))
        yield Block(found[2], text, page.count("\n", 0, found.start()) + 2)


def quick(manifest: Path) -> list[str]:
    """Overrides that keep a run's parts: on a little text, and of a long run two updates of a small model."""
    tables = tomli.loads(manifest.read_text("utf-8"))
    text = ["data.limit_bytes=100000"] if tables.get("data", {}).get("source") == "dsx_text:files" else []
    changes = [*text, *(_small(tables) if tables.get("run", {}).get("steps", 0) > 50 else ())]
    return [word for change in changes for word in ("--set", change)]


def _small(tables: Mapping[str, Any]) -> list[str]:
    changes = ["run.steps=2"]
    for name, options in tables.get("optimize", {}).items():
        if isinstance(options, dict) and "warmup" in options:
            changes.append(f"optimize.{name}.warmup=1")
    if tables["model"]["factory"] == "dsx_text:gpt":
        changes += ["model.layers=1", "model.width=32", "model.context=32"]
    if tables["data"]["source"] == "dsx_text:files":
        changes.append("data.context=32")
    if "evaluate" in tables:
        changes += ["evaluate.every=1", "evaluate.samples=4"]
    return changes


class Reader:
    """Does what a page says, in the current folder.

    names    given to its Python
    shown    takes what was printed since it was last asked
    skipped  commands that are not run
    site     a folder on sys.path for the metadata of what the page installs
    """

    def __init__(
        self, page: str, *, names: Mapping[str, Any], shown: Callable[[], str], skipped: Mapping[str, str], site: Path
    ) -> None:
        self._page, self._shown, self._skipped, self._site = page, shown, skipped, site
        self._names: dict[str, Any] = {"__name__": "__main__", **names}
        self._home, self._output = Path.cwd(), ""

    def read(self, block: Block) -> None:
        """AssertionError with the place on the page, or what its Python raises."""
        if file := _FILE.match(block.text):
            Path(file[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(file[1]).write_text(block.text, "utf-8")
            return
        if block.kind == "text":
            self._compare(block)
            return
        self._shown()
        self._forget()
        self._act(block)
        self._output = self._shown()

    def _act(self, block: Block) -> None:
        if block.kind == "python":
            source = "\n" * (block.line - 1) + block.text
            exec(compile(source, self._page, "exec", dont_inherit=True), self._names)
        elif block.kind == "toml":
            resolve(Manifest.of(tomli.loads(block.text)), Registry.scan())
        elif block.kind == "sh":
            for number, line in enumerate(block.text.splitlines()):
                self._command_line(line, f"{self._page}:{block.line + number}")
        else:
            raise AssertionError(f"{self._page}:{block.line}: a block of the kind '{block.kind}' is not known")

    def _compare(self, block: Block) -> None:
        printed = iter([" ".join(line.split()) for line in self._output.splitlines()])
        for number, line in enumerate(block.text.splitlines()):
            pattern = ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
            found = any(re.fullmatch(pattern, candidate) for candidate in printed)
            assert found, f"{self._page}:{block.line + number}: {line!r} was not printed, but this:\n{self._output}"

    def _command_line(self, line: str, place: str) -> None:
        words, _, comment = line.partition("#")
        expected = int(comment.split()[2]) if comment.strip().startswith("exit code ") else 0
        for part in filter(None, map(str.strip, words.split("&&"))):
            if part in self._skipped:
                continue
            self._forget()
            code = self._command(shlex.split(part), place)
            assert code == expected, f"{place}: `{part}` ends with {code}, not {expected}:\n{self._shown()}"

    def _command(self, words: list[str], place: str) -> int:
        match words:
            case ["dsx", "run", manifest, *_] if Path(manifest).is_file():
                return call([*words[1:], *quick(Path(manifest))])
            case ["dsx", *arguments]:
                return call(arguments)
            case ["pip", "install", "-e", *_]:
                add_metadata(Path.cwd(), self._site)
                sys.path.insert(0, str(Path.cwd()))
                return 0
            case ["cd", folder]:
                os.chdir(folder)
                return 0
            case ["pytest" | "python", *arguments]:
                return self._python(["-m", "pytest", *arguments] if words[0] == "pytest" else arguments)
        known = "teach `Reader` how, or skip it with a reason"
        raise AssertionError(f"{place}: nobody knows how to run `{shlex.join(words)}`: {known}")

    def _python(self, arguments: list[str]) -> int:
        path = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run([sys.executable, *arguments], env=os.environ | {"PYTHONPATH": path}, check=False)
        return done.returncode

    def _forget(self) -> None:
        """Modules of the page's folder: every command of a reader starts in a new process."""
        for name, module in list(sys.modules.items()):
            if (getattr(module, "__file__", None) or "").startswith(f"{self._home}{os.sep}"):
                del sys.modules[name]
