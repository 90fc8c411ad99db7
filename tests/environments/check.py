"""Fresh environments that lack something: the kernels' tests and a training run pass, and what is missing is said.

    python tests/environments/check.py [compiler] [triton] [cupy] [--suite]

For each a clone of this checkout is installed into a virtual environment of its own, one after the other: without a C++
compiler on the path, without triton, without cupy. --suite runs all tests in each, a quarter of an hour or more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPILERS = re.compile(r"(.*-)?(c\+\+|g\+\+|gcc|cc|c89|c99|clang|clang\+\+|nvcc)(-[\d.]+)?")
"""Names of programs that an environment without a compiler must not find."""


@dataclass(frozen=True)
class Lack:
    """What an environment lacks.

    packages     installed beside dsx
    finding      the check of `dsx doctor` that must say so
    kernels      implementations that `dsx kernels` must call missing, with these words
    """

    packages: tuple[str, ...]
    finding: str
    kernels: dict[str, str]


LACKS = {
    "compiler": Lack(("triton", "cupy-cuda13x"), "compiler", {"native": "the native library is not built"}),
    "triton": Lack(("cupy-cuda13x",), "triton", {"triton": "needs triton, which is not installed"}),
    "cupy": Lack(("triton",), "cupy", {"cuda": "needs cupy, which is not installed"}),
}


class Environment:
    """A clone, installed into a virtual environment, and commands run in them."""

    def __init__(self, folder: Path, lack: str) -> None:
        self._folder, self._name, self._lack = folder, lack, LACKS[lack]
        self._checkout, self._bin = folder / "clone", folder / "venv" / "bin"
        self._settings = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DSX_"))}
        self._settings["PATH"] = os.pathsep.join([str(self._bin), self._programs()])

    def make(self) -> None:
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self._checkout)], check=True)
        venv.create(self._folder / "venv", with_pip=True)
        pip = ["python", "-m", "pip", "install", "--quiet", "--no-compile", "-c", "constraints.txt"]
        self.run(*pip, ".[test]", *self._lack.packages)

    def check(self, suite: bool) -> None:
        found = self._json("doctor", "--json")
        said = next(finding for finding in found if finding["check"] == self._lack.finding)
        assert said["state"] == "note" and said["advice"], f"dsx doctor does not say what is missing: {said}"
        assert not [finding for finding in found if finding["state"] == "broken"], found
        for each in self._json("kernels", "--json"):
            words = self._lack.kernels.get(each["implementation"], "")
            assert words in (each["missing"] or ""), f"dsx kernels does not say why not: {each}"
            assert each["missing"] or each["implementation"] not in self._lack.kernels, f"not missing: {each}"
        run = ["docs/manifests/quickstart.toml", "--overwrite", "--set", "run.steps=20"]
        self.run("dsx", "run", *run, "--set", "optimize.warmup_cosine.warmup=2")
        two_at_once = ["-n", "2", "--dist", "loadfile"]  # as `make test` does
        self.run(
            *("python", "-m", "pytest", "-q"),
            *(two_at_once if suite else ["tests/kernels", "tests/plugins/test_optimizers.py"]),
        )

    def run(self, *command: str) -> str:
        """What a command prints; an error with all of it if it fails."""
        started = time.monotonic()
        done = subprocess.run(
            command, cwd=self._checkout, env=self._settings, capture_output=True, text=True, check=False
        )
        words = f"without {self._name}: {' '.join(command)[:100]}"
        if done.returncode:
            sys.exit(f"{words}: exit code {done.returncode}\n{done.stdout[-5000:]}{done.stderr[-5000:]}")
        last = (done.stdout.strip().splitlines() or [""])[-1]
        print(f"{words}: {time.monotonic() - started:.0f} s: {last}", flush=True)
        return done.stdout

    def _json(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("dsx", *arguments))
        return found

    def _programs(self) -> str:
        """The path; without compilers a folder of links to all other programs."""
        if self._name != "compiler":
            return self._settings["PATH"]
        links = self._folder / "programs"
        links.mkdir()
        for program in _programs_of(self._settings["PATH"]):
            if not COMPILERS.fullmatch(program.name) and not (links / program.name).is_symlink():
                (links / program.name).symlink_to(program)
        return str(links)


def _programs_of(path: str) -> Iterator[Path]:
    for folder in filter(None, path.split(os.pathsep)):
        if Path(folder).is_dir():
            yield from (file for file in Path(folder).iterdir() if file.is_file() and os.access(file, os.X_OK))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lacks", nargs="*", choices=[*LACKS, []], help="what environments lack; all three by default")
    parser.add_argument("--suite", action="store_true", help="run all tests, not only those of kernels and optimizers")
    choices = parser.parse_args()
    for lack in choices.lacks or LACKS:
        with tempfile.TemporaryDirectory(prefix=f"dsx_without_{lack}_") as folder:
            environment = Environment(Path(folder), lack)
            environment.make()
            environment.check(choices.suite)
        print(f"without {lack}: all is well", flush=True)


if __name__ == "__main__":
    main()
