"""Kernels of `block_attention` compiled for GPUs that are not here: `python -m kernels.triton_attention_targets`.

Prints what each takes of a GPU; exit code 1 if one spills more than a little, or needs more shared memory
than there is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from dsx_kernels.block_attention import triton_engine
from kernels.attention_cases import BF16, F16, F32, Case
from kernels.registers import beyond
from kernels.triton_targets import TARGETS, Launch, compiled

CASES = (
    Case(1024, 1024, block=128, dim=64, dtype=BF16),
    Case(1024, 1024, block=128, dim=128, dtype=BF16),
    Case(1024, 1024, block=64, dim=256, dtype=F16, bias=(1, 2, 1024, 1024), padding=True),
    Case(1024, 1024, block=64, dim=64, dtype=F32),
    Case(1024, 1024, block=16, dim=80, dtype=BF16, bits=True, segments=True, dropout=0.1),
)
"""Kinds of calls that differ in what is compiled."""

SPILLED = 64
"""Bytes that a thread may spill: what is live outside of the loops."""


def launches(case: Case) -> Iterator[tuple[str, Launch]]:
    """The kernels of both passes, with what they would be started with."""
    tensors = case.tensors()
    call = case.call(case.layout(), tensors)
    q, k, v = (tensors[name] for name in "qkv")
    with mock.patch.object(triton_engine, "start") as start:
        out, lse = triton_engine.forward(q, k, v, call)
        triton_engine.backward(tensors["grad"], None, q, k, v, out, lse, call, case.bias is not None)
    for kernel, _, arguments, constants in (started.args for started in start.call_args_list):
        named = {**dict.fromkeys(kernel.arg_names), **arguments}
        values = tuple(named[name] for name in kernel.arg_names if name not in constants)
        yield kernel.fn.__name__, Launch(kernel, values, constants, options_of(constants))


def options_of(constants: dict[str, Any]) -> dict[str, Any]:
    return {"num_warps": triton_engine.warps(constants), "num_stages": 2}


def main() -> int:
    found: dict[str, dict[str, dict[str, dict[str, int]]]] = {}
    for case in CASES:
        for name, launch in launches(case):
            found.setdefault(name, {})[str(case)] = {target: compiled(launch, target) for target in TARGETS}
    for name, made in found.items():
        for case_, targets in made.items():
            print(name, case_, targets)
    problems = list(beyond("triton", found, SPILLED))
    print(
        "\n".join(problems) or f"no kernel is beyond a limit: {sum(map(len, found.values()))} on {', '.join(TARGETS)}"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
