"""A Triton kernel compiled ahead of time for a GPU that is not here, and what it takes of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dsx_kernels.triton_blocks import OPTIONS
from kernels.cases import BF16, F16, F32, F64
from kernels.registers import I32, Taken, widest_access

TARGETS: Mapping[str, GPUTarget] = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

_TYPES = {
    F32: "*fp32",
    BF16: "*bf16",
    F16: "*fp16",
    F64: "*fp64",
    I32: "*i32",
    torch.uint8: "*u8",
}


@dataclass(frozen=True)
class Launch:
    """What an implementation would start."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)

    def source(self) -> ASTSource:
        """With pointers to multiples of 16 bytes, as whole tensors have; integers as a start sees them."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for place, (name, value) in enumerate(zip(self.kernel.arg_names, self.arguments, strict=False)):
            if value is None:
                signature[name], constants[(place,)] = "constexpr", None
            elif isinstance(value, (int, float)):
                signature[name] = self.kernel.params[place].annotation_type or "i32"
                if isinstance(value, int) and value % 16 == 0 and not self.kernel.params[place].do_not_specialize:
                    attributes[(place,)] = [["tt.divisibility", 16]]
            else:
                signature[name], attributes[(place,)] = _TYPES[value.dtype], [["tt.divisibility", 16]]
        for name, value in self.constants.items():
            signature[name], constants[(self.kernel.arg_names.index(name),)] = "constexpr", value
        return ASTSource(self.kernel, signature, constants, attributes)


def compiled(launch: Launch, target: str) -> Taken:
    """What a kernel takes of a target."""
    place = TARGETS[target]
    made = triton.compile(launch.source(), target=place, options=dict(launch.options))
    found = _amd(made.asm["amdgcn"]) if place.backend == "hip" else _nvidia(made.asm["ptx"], place.arch)
    return {**found, "shared": made.metadata.shared}


def _amd(text: str) -> dict[str, int]:
    """Scalar registers that are kept in lanes of vector registers count as spilled, though that is no memory."""

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
    return {"registers": int(registers[1]), "spilled": spilled, "widest": widest_access(ptx)}


def _ptxas(arch: int) -> str:
    """The assembler that Triton itself takes for a target."""
    from triton.backends.nvidia.compiler import get_ptxas

    return str(get_ptxas(arch).path)
