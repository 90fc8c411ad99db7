"""What compilers make of kernels for GPUs that are not here: limits, and the numbers committed in registers.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kernels.cases import BF16, F16, F32, F64, TABLE, Case

FILE = Path(__file__).with_name("registers.json")

I32 = torch.int32

SHARED = {"sm_80": 163, "sm_90": 227, "sm_100": 227, "gfx942": 64}
"""How much shared memory a block may have on a target, in KiB."""

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
    "momentum": ((F32, F32, F32), (F32, BF16, None), (F64, F64, F64)),
    "signs": (
        (F32, F32, I32, I32, F32),
        (BF16, F32, I32, I32, F32),
        (F64, F64, I32, I32, F64),
        (F32, F32, I32, I32, F32, BF16, F32),
        (None, F32, I32, I32, F32, BF16, F32),
        (F64, F64, I32, I32, F64, F64, F64),
    ),
    "signs_mean": ((I32, F32, I32, F32), (I32, F32, I32, BF16), (I32, F64, I32, F64)),
    "lamb": ((F32,) * 5, (F64,) * 5),
}
"""Dtypes of the tensors of each call that is compiled."""

BY_WORD = (("nvcc", "signs"), ("nvcc", "signs_mean"))
"""Where each thread makes a word of bits: a warp's accesses lie next to one another, of an element each."""

Taken = Mapping[str, int]
"""`registers` and `spilled` of a thread, `shared` bytes of a block, and the `widest` global access in bytes."""
Table = Mapping[str, Mapping[str, Mapping[str, Taken]]]
"""By operation, dtypes in words, and target."""


def wanted(operation: str) -> Iterator[tuple[str, Case]]:
    """Dtypes in words, and a case with them."""
    for dtypes in WANTED[operation]:
        like = next(case for case in TABLE[operation] if case.size == 4096 and len(case.tensors) == len(dtypes))
        case = replace(like, tensors=dict(zip(like.tensors, dtypes, strict=True)))
        yield "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype and dtype.is_floating_point), case


def widest_access(ptx: str) -> int:
    """Bytes of the widest access to global memory."""
    accesses = re.findall(r"(?:ld|st)\.global(?:\.[a-z]+)*(?:\.v(\d))?\.[bfu](\d+)", ptx)
    return max(int(count or 1) * int(bits) // 8 for count, bits in accesses)


def conclude(compiler: str, version: str, found: Table, write: bool, problems: Sequence[str] = ()) -> int:
    """Print these problems, what is beyond a limit and, where the file is of this version, what differs from it.

    Returns the exit code.
    """
    problems = [*problems, *beyond(compiler, found)]
    kept = json.loads(FILE.read_text())
    mine = {"version": version, "kernels": found}
    if write:
        FILE.write_text(_text({**kept, compiler: mine}))
    elif kept[compiler]["version"] == version and kept[compiler]["kernels"] != found:
        problems.append(f"{FILE.name} is not what is made here:\n{_text({compiler: mine})}")
    kernels = [targets for each in found.values() for targets in each.values()]
    print("\n".join(problems) or f"no kernel spills: {len(kernels)} on {', '.join(kernels[0])}")
    return 1 if problems else 0


def beyond(compiler: str, found: Table) -> Iterator[str]:
    """What is beyond a limit, in words."""
    for operation, kernels in found.items():
        for words, targets in kernels.items():
            for target, takes in targets.items():
                here, most = f"{operation} {words} on {target}", 1024 * SHARED[target]
                if takes["spilled"]:
                    yield f"{here}: {takes['spilled']} bytes or registers are spilled"
                if takes["shared"] > most:
                    yield f"{here}: {takes['shared']} bytes of shared memory, at most {most} there"
                if takes["widest"] < (8 if target.startswith("gfx") else 16) and (compiler, operation) not in BY_WORD:
                    yield f"{here}: accesses of {takes['widest']} bytes at most"


def _text(found: Mapping[str, Any]) -> str:
    """JSON with a line for each kernel."""
    compilers = []
    for compiler, made in found.items():
        operations = []
        for operation, kernels in made["kernels"].items():
            lines = [f'   "{words}": {json.dumps(takes)}' for words, takes in kernels.items()]
            operations.append(f'  "{operation}": {{\n' + ",\n".join(lines) + "\n  }")
        head = f' "{compiler}": {{"version": "{made["version"]}", "kernels": {{\n'
        compilers.append(head + ",\n".join(operations) + "\n }}")
    return "{\n" + ",\n".join(compilers) + "\n}\n"
