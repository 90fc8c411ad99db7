"""CUDA kernels compiled by nvcc for GPUs that are not here, and what they take of each.

python -m kernels.cuda_targets [--write]      compares with registers.json, or writes it
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from dsx_kernels import cuda_launch
from kernels.cuda_host import kernels_of, source_of
from kernels.registers import WANTED, Taken, conclude, wanted, widest_access

TARGETS = ("sm_80", "sm_90", "sm_100")

OPTIONS = [option for option in cuda_launch.OPTIONS if option != "-default-device"]
"""That one is known to NVRTC alone, and changes nothing."""

INEXACT = re.compile(r"\b(?:(?:fma|mad)\.\S*f\d\d|\w+\.(?:\w+\.)*(?:ftz|approx|full)\b\S*)")
"""Instructions by which an element would get other bits than on a CPU."""


def nvcc() -> str | None:
    """The compiler: on the path, or of the package nvidia-cuda-nvcc."""
    if found := shutil.which("nvcc"):
        return found
    spec = find_spec("nvidia")
    places = (spec.submodule_search_locations or []) if spec else []
    files = (file for place in places for file in sorted(Path(place).glob("*/bin/nvcc")))
    return next(map(str, files), None)


def missing() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    if nvcc() is None:
        return "there is no nvcc: pip install '.[nvcc]'"
    return None if shutil.which("c++filt") and shutil.which("g++") else "nvcc needs g++ and c++filt"


def version() -> str:
    text = subprocess.run([str(nvcc()), "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    assert found is not None, text
    return found[1]


def compiled(operation: str) -> Iterator[tuple[str, Mapping[str, Taken], list[str]]]:
    """Dtypes in words, what the kernel takes of each target, and its instructions that do not round to nearest."""
    expressions = {words: kernels_of(operation, case)[0] for words, case in wanted(operation)}
    with tempfile.TemporaryDirectory(prefix="dsx_cuda_") as folder:
        log = _compile(source_of(operation), list(expressions.values()), Path(folder))
        taken = dict(_taken(log))
        code = {target: dict(_kernels(Path(folder), target)) for target in TARGETS}
    for words, expression in expressions.items():
        found = {
            target: {**taken[expression, target], "widest": widest_access(code[target][expression])}
            for target in TARGETS
        }
        yield words, found, INEXACT.findall(code[TARGETS[0]][expression])


def _compile(source: Path, expressions: list[str], folder: Path) -> str:
    """All kernels for all targets, with their PTX left in the folder; what the assembler says of them."""
    kept = ", ".join(f"(void*)&{expression}" for expression in expressions)
    file = folder / "kernels.cu"
    file.write_text(f'#include "{source}"\nvoid* kept[] = {{{kept}}};\n')
    targets = [f"-gencode=arch={target.replace('sm', 'compute')},code={target}" for target in TARGETS]
    command = [str(nvcc()), *OPTIONS, "-O3", "-fatbin", "-keep", "-keep-dir", str(folder), "-Xptxas", "-v", *targets]
    done = subprocess.run(
        [*command, str(file), "-o", str(folder / "kernels.fatbin")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{source} does not compile:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _taken(log: str) -> Iterator[tuple[tuple[str, str], dict[str, int]]]:
    entries = re.split(r"Compiling entry function ", log)[1:]
    names = _demangled([entry.split("'")[1] for entry in entries])
    for name, entry in zip(names, entries, strict=True):
        registers = re.search(r"Used (\d+) registers", entry)
        assert registers is not None, entry
        spilled = sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill)", entry)))
        shared = sum(map(int, re.findall(r"(\d+) bytes smem", entry)))
        taken = {"registers": int(registers[1]), "spilled": spilled, "shared": shared}
        yield (name, entry.split("'")[3]), taken


def _kernels(folder: Path, target: str) -> Iterator[tuple[str, str]]:
    """The PTX of each kernel by its name."""
    ptx = (folder / f"kernels.{target.replace('sm', 'compute')}.ptx").read_text()
    entries = re.split(r"\.entry ", ptx)[1:]
    return zip(_demangled([entry.split("(")[0] for entry in entries]), entries, strict=True)


def _demangled(names: list[str]) -> list[str]:
    """Names of functions with their template arguments."""
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    return [line.removeprefix("void ").partition("(")[0] for line in done.stdout.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    write = parser.parse_args().write
    found: dict[str, dict[str, Mapping[str, Taken]]] = {operation: {} for operation in WANTED}
    problems = []
    for operation, kernels in found.items():
        for words, takes, inexact in compiled(operation):
            kernels[words] = takes
            problems += [f"{operation} {words}: {instruction} does not round to nearest" for instruction in inexact]
    return conclude("nvcc", version(), found, write, problems)


if __name__ == "__main__":
    sys.exit(main())
