"""Triton kernels compiled ahead of time for GPUs that are not here, and what they take of each.

    python -m kernels.triton_targets [--write]      compares with registers.json, or writes it

An implementation runs up to the start of its kernel; in place of that, what would be started is compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsx_kernels.triton_blocks import BLOCK, OPTIONS
from kernels.cases import BF16, F16, F32, F64, TABLE, Case, call

FILE = Path(__file__).with_name("registers.json")

TARGETS: Mapping[str, tuple[GPUTarget, int]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163),
    "sm_90": (GPUTarget("cuda", 90, 32), 227),
    "sm_100": (GPUTarget("cuda", 100, 32), 227),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64),
}
"""By name: the target, and how much shared memory a block may have there, in KiB."""

WANTED: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "squares": ((F32,), (BF16,), (F16,), (F64,)),
    "adamw": (
        (F32, F32, F32, F32, None, None),
        (BF16, F32, F32, F32, None, BF16),
        (F16, F32, F32, F32, F32, F16),
        (F64, F64, F64, F64, F64, None),
    ),
    "sgd": ((F32, F32, F32, None), (BF16, F32, None, BF16), (F64, F64, F64, None)),
    "cast": ((F32, BF16), (BF16, F32), (F32, F16), (F16, BF16), (F64, BF16)),
    "accumulate": ((F32, BF16), (F32, F32), (F64, F16)),
}
"""Dtypes of the tensors of each call that is compiled; the first case of the table with them is taken, or its like."""

_TYPES = {F32: "*fp32", BF16: "*bf16", F16: "*fp16", F64: "*fp64"}


@dataclass(frozen=True)
class Launch:
    """What an implementation would start."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]

    def source(self) -> ASTSource:
        """With pointers to multiples of 16 bytes, as tensors of their own have."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for place, (name, value) in enumerate(zip(self.kernel.arg_names, self.arguments, strict=False)):
            if value is None:
                signature[name], constants[(place,)] = "constexpr", None
            elif isinstance(value, (int, float)):
                signature[name] = "i32" if isinstance(value, int) else self.kernel.params[place].annotation_type
            else:
                signature[name], attributes[(place,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        for name, value in self.constants.items():
            signature[name], constants[(self.kernel.arg_names.index(name),)] = "constexpr", value
        return ASTSource(self.kernel, signature, constants, attributes)


def launches(operation: str) -> Iterator[tuple[str, Launch]]:
    """The dtypes in words, and what is started for them."""
    module = import_module(f"dsx_kernels.{operation}.triton_{operation}")
    for dtypes in WANTED[operation]:
        like = next(case for case in TABLE[operation] if case.size == 1000 or case.operation not in ("adamw", "sgd"))
        case = Case(operation, dict(zip(like.tensors, dtypes, strict=True)), 4096, like.options)
        with mock.patch.object(module, "launch") as launch:
            call(getattr(module, operation), case, case.make())
        (kernel, _, *arguments), constants = launch.call_args
        constants["BLOCK"] = constants.pop("block", BLOCK)
        words = "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype)
        yield words, Launch(kernel, tuple(arguments), constants)


def compiled(launch: Launch, target: str) -> dict[str, int]:
    """`registers` and `spilled` of a thread, `shared` bytes of a block, and the `widest` global access in bytes."""
    place, _ = TARGETS[target]
    made = triton.compile(launch.source(), target=place, options=OPTIONS)
    found = _amd(made.asm["amdgcn"]) if place.backend == "hip" else _nvidia(made.asm["ptx"], place.arch)
    return {**found, "shared": made.metadata.shared}


def _amd(text: str) -> dict[str, int]:
    def count(what: str) -> int:
        return sum(int(number) for number in re.findall(rf"\.{what}:\s+(\d+)", text))

    widest = max(4 * int(width or 1) for width in re.findall(r"global_(?:load|store)_dword(?:x(\d))?", text))
    spilled = count("vgpr_spill_count") + count("sgpr_spill_count") + count("private_segment_fixed_size")
    return {"registers": count("vgpr_count"), "spilled": spilled, "widest": widest}


def _nvidia(ptx: str, arch: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory(prefix="dsx_ptx_") as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        name = re.search(r"\.target (\S+?)[,\s]", ptx)
        assert name is not None, "the PTX names no target"
        command = [_ptxas(arch), "-v", f"-arch={name[1]}", str(source), "-o", str(Path(folder, "kernel.cubin"))]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert registers is not None, done.stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill)", done.stderr)))
    accesses = re.findall(r"(?:ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", ptx)
    widest = max(int(count or 1) * int(bits) // 8 for count, bits in accesses)
    return {"registers": int(registers[1]), "spilled": spilled, "widest": widest}


def _ptxas(arch: int) -> str:
    """The assembler that Triton itself takes for a target."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(arch).path)


def table() -> dict[str, dict[str, dict[str, dict[str, int]]]]:
    """By operation, dtypes and target."""
    return {
        operation: {
            words: {target: compiled(launch, target) for target in TARGETS} for words, launch in launches(operation)
        }
        for operation in WANTED
    }


def beyond(found: Mapping[str, Mapping[str, Mapping[str, Mapping[str, int]]]]) -> Iterator[str]:
    """What is beyond a limit, in words."""
    for operation, kernels in found.items():
        for words, targets in kernels.items():
            for target, takes in targets.items():
                here, most = f"{operation} {words} on {target}", 1024 * TARGETS[target][1]
                if takes["spilled"]:
                    yield f"{here}: {takes['spilled']} bytes or registers are spilled"
                if takes["shared"] > most:
                    yield f"{here}: {takes['shared']} bytes of shared memory, at most {most} there"
                if takes["widest"] < (8 if target.startswith("gfx") else 16):
                    yield f"{here}: accesses of {takes['widest']} bytes at most"


def text(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """JSON with a line for each kernel."""
    operations = []
    for operation, kernels in found.items():
        lines = [f'  "{words}": {json.dumps(takes)}' for words, takes in kernels.items()]
        operations.append(f' "{operation}": {{\n' + ",\n".join(lines) + "\n }")
    return f'{{"triton": "{triton.__version__}", "kernels": {{\n' + ",\n".join(operations) + "\n}}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    found = table()
    problems = list(beyond(found))
    if parser.parse_args().write:
        FILE.write_text(text(found))
    before = json.loads(FILE.read_text())
    if before["triton"] == triton.__version__ and before["kernels"] != found:
        problems.append(f"{FILE.name} is not what is made here:\n{text(found)}")
    print("\n".join(problems) or f"no kernel spills: {sum(map(len, found.values()))} on {', '.join(TARGETS)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
