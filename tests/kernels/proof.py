"""The page docs/reference/kernels.md: what each implementation of each operation is held against, and how."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kernels import attention_cases
from kernels.cases import SIZES, TABLE, ULPS
from kernels.registers import FILE

KERNELS = Path(__file__).parents[2] / "kernels" / "dsx_kernels"

_HOW = {
    "native": "every case, on each instruction set of the processor, on one thread and on two, the same bits each time",
    "triton": "every case in Triton's interpreter, where an element depends on its own numbers only with the bits of "
    "`native`; compiled for the GPUs below",
    "cuda": "every case on the CPU, compiled by g++ with threads that take turns, with the bits of `native`; compiled "
    "for the NVIDIA GPUs below, without an instruction that fuses, approximates or flushes",
}
_NAMES = {"triton": "Triton", "nvcc": "nvcc"}
_INTRO = """# Kernels

Operations of `dsx_kernels`. `dsx kernels` says which implementation runs on this machine, and why another cannot.

Each is held against the reference, computed in float64 from the same inputs, by one table of cases for each operation
(`tests/kernels/cases.py`): {sizes} elements, every dtype, tensors that
start off alignment, NaN, infinities and subnormal numbers; what lies around a tensor must stay as it is. An error is
measured in units of the last place, in the dtype that is computed in, of what an element is the sum of; rounding to 16
bits adds half a unit of theirs.
"""
_ATTENTION = """`block_attention` ({implementations}) is held against dense attention with the explicit mask of
tokens, computed in float64: the output, the log-sum-exp and every gradient, in {cases} cases
(`tests/kernels/attention_cases.py`: lengths from 1 to 1,025, and 4,097; heads of 8 to 256; every rule of a block,
padding, bias, dropout, grouped heads, any strides). An error is at most {fp32:g} in fp32, {bf16:g} in bf16 and {fp16:g}
in fp16 of the largest number of a tensor, and of its norm.
"""
_GPU = """## On a GPU

`bash tests/device/check.sh` runs the same cases on the GPU of the machine it is started on, and times them against its
bandwidth, `block_attention` against torch's. No figure of a GPU is in these pages: none was measured yet.

What Triton {triton} and nvcc {nvcc} make for GPUs that are not at hand: registers a thread and bytes of shared memory a
block. None spills a register, not even to lanes of other registers. Their tests hold these numbers, where those
versions are installed; with others they hold the limits: nothing spilled, no more shared memory than there is, 16-byte
accesses (8 on gfx942).

Triton comes first where both are there, and which is faster was not measured: `DSX_KERNELS=adamw=cuda` takes the other.
"""


def page() -> str:
    intro = _INTRO.format(sizes=", ".join(map(str, SIZES[:-1])) + f" and {SIZES[-1]:_}")
    made = [intro, _cases(), _ways(), _attention()]
    found = json.loads(FILE.read_text())
    versions = {compiler: each["version"] for compiler, each in found.items()}
    tables = (f"By {_NAMES[compiler]}:\n\n{_registers(each['kernels'])}" for compiler, each in found.items())
    return "\n".join([*made, _GPU.format(**versions), *tables])


def _cases() -> str:
    rows = [
        (f"`{operation}`", str(len(cases)), str(ULPS[operation]), ", ".join(implementations(operation)))
        for operation, cases in TABLE.items()
    ]
    return _table(("operation", "cases", "error at most, ulp", "implementations"), rows)


def implementations(operation: str) -> list[str]:
    files = {"native": "native.cpp", "triton": "triton_*.py", "cuda": "cuda.cu", "reference": "reference.py"}
    return [name for name, file in files.items() if any((KERNELS / operation).glob(file))]


def _attention() -> str:
    most = attention_cases.TOLERANCE
    return _ATTENTION.format(
        implementations=", ".join(implementations("block_attention")),
        cases=len(attention_cases.CASES),
        fp32=most[torch.float32],
        bf16=most[torch.bfloat16],
        fp16=most[torch.float16],
    )


def _ways() -> str:
    return _table(("implementation", "held against it by"), list(_HOW.items()))


def _registers(found: dict[str, dict[str, dict[str, Any]]]) -> str:
    targets = next(iter(next(iter(found.values())).values()))
    rows = []
    for operation, kernels in found.items():
        for words, each in kernels.items():
            cells = (f"{takes['registers']}, {takes['shared']}" for takes in each.values())
            rows.append((f"`{operation}`", words.replace("-", ", "), *cells))
    return _table(("operation", "dtypes", *targets), rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = (f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows))
    return "\n".join(lines) + "\n"
