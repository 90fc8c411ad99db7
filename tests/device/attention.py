"""`block_attention` by every implementation of it that this device has: against dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from device.kernels import missing, while_written
from device.part import Checks, Figures
from dsx_kernels.block_attention.engine import Engine
from dsx_kernels.block_attention.ops import OPERATION
from dsx_kernels.choice import REFERENCE
from kernels.attention_cases import CASES, Case, check, run

STREAM = Case(512, 512, block=64, dim=64)
"""Whose inputs are still being written when its kernels are started."""


def checks(device: str, argument: str | None) -> Checks:
    """`argument`: a dtype."""
    dtype = getattr(torch, argument or "bfloat16")
    for implementation in OPERATION.implementations():
        if implementation.name == REFERENCE or device not in implementation.devices:
            continue
        if (reason := implementation.missing()) is not None:
            yield implementation.name, partial(missing, reason)
            continue
        engine = cast(Engine, implementation.load())
        for case in _cases(dtype):
            yield f"{implementation.name}: {case}", partial(_is_dense_attention, engine, case, device)
        if device == "cuda":
            case = replace(STREAM, dtype=dtype)
            yield f"{implementation.name}: on the current stream", partial(_waits_for_its_stream, engine, case)


def _cases(dtype: torch.dtype) -> Iterator[Case]:
    yield from (replace(case, dtype=dtype) for case in CASES)
    yield Case(4097, 4097, block=128, heads=1, key_heads=1, near=4, dtype=dtype)


def _is_dense_attention(engine: Engine, case: Case, device: str) -> Figures:
    first, again = check(engine, case, device), run(engine, case, device)
    different = [name for name, tensor in again.items() if not torch.equal(tensor, first[name])]
    assert not different, f"other bits in {', '.join(different)} when it runs again"
    return None


def _waits_for_its_stream(engine: Engine, case: Case) -> Figures:
    """What a stream still has to write into the tensors must be there when the kernels read them."""
    tensors = {name: tensor.cuda() for name, tensor in case.tensors().items()}
    call = case.call(case.layout().to("cuda"), tensors)

    def passes() -> list[Tensor]:
        q, k, v = (tensors[name] for name in "qkv")
        out, lse = engine.forward(q, k, v, call)
        return [out, lse, *engine.backward(tensors["grad"], None, q, k, v, out, lse, call, False)[:3]]

    wanted, found = passes(), while_written(tensors, passes)
    assert all(map(torch.equal, found, wanted)), "other results: it did not wait for its stream"
    return None
