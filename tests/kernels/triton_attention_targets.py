"""Calls of `block_attention` whose Triton kernels are compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

from dsx_kernels.block_attention import triton_engine
from kernels.attention_cases import BF16, F16, F32, Case
from kernels.triton_compile import Launch

CASES = (
    Case(1024, 1024, block=128, dim=64, dtype=BF16),
    Case(1024, 1024, block=128, dim=128, dtype=BF16),
    Case(1024, 1024, block=64, dim=256, dtype=F16, bias=(1, 2, 1024, 1024), padding=True),
    Case(1024, 1024, block=64, dim=64, dtype=F32),
    Case(1024, 1024, block=16, dim=80, dtype=BF16, bits=True, segments=True, dropout=0.1),
)
"""Kinds of calls that differ in what is compiled."""


def launches() -> Iterator[tuple[str, Launch]]:
    """The kernels of both passes in words, with what they would be started with."""
    for case in CASES:
        for name, launch in _launches(case):
            yield f"{name} {_words(case)}", launch


def _words(case: Case) -> str:
    rules = [rule for rule in ("bias", "padding", "bits", "segments", "dropout") if getattr(case, rule)]
    words = [str(case.dtype).removeprefix("torch."), f"{case.dim} wide", f"blocks of {case.block}", *rules]
    return "-".join(words)


def _launches(case: Case) -> Iterator[tuple[str, Launch]]:
    tensors = case.tensors()
    call = case.call(case.layout(), tensors)
    q, k, v = (tensors[name] for name in "qkv")
    with mock.patch.object(triton_engine, "start") as start:
        out, lse = triton_engine.forward(q, k, v, call)
        triton_engine.backward(tensors["grad"], None, q, k, v, out, lse, call, case.bias is not None)
    for kernel, _, arguments, constants in (started.args for started in start.call_args_list):
        named = {**dict.fromkeys(kernel.arg_names), **arguments}
        values = tuple(named[name] for name in kernel.arg_names if name not in constants)
        yield kernel.fn.__name__, Launch(kernel, values, constants, triton_engine.options(constants))
