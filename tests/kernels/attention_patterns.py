"""Every pattern by one implementation, against dense attention with the pattern's explicit mask in float64.

    python -m kernels.attention_patterns native|reference
    TRITON_INTERPRET=1 python -m kernels.attention_patterns triton

Lengths 1 to 4,097, fp32 and bf16, two query heads of one key head, tensors [batch, tokens, heads, dim] seen as
[batch, heads, tokens, dim], key padding that leaves some rows without keys; native at every instruction level that the
processor has. Output, log-sum-exp and all gradients. Prints the worst of each pattern; exit code 1 if any is off. At
4,097 tokens two sequences take some GB.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module

import torch
from torch import Tensor

from dsx_kernels import library
from dsx_kernels.block_attention import BlockLayout
from dsx_kernels.block_attention.engine import Call, Engine
from dsx_sparse import (
    bigbird,
    dense,
    dilated,
    document,
    fixed,
    global_blocks,
    global_local,
    local_blocks,
    mixed,
    sliding_window,
    streaming,
    strided,
    variable,
)
from dsx_sparse.layout import layout
from dsx_sparse.pattern import Pattern
from dsx_sparse.region import Shape
from kernels.attention_cases import BF16, F32, F64, TOLERANCE

LENGTHS = (1, 17, 128, 1000, 1025, 4097)
BATCH, HEADS, DIM = 2, 2, 32
ENGINES = {
    "native": "dsx_kernels.block_attention.native",
    "reference": "dsx_kernels.block_attention.reference",
    "triton": "dsx_kernels.block_attention.triton_engine",
}


def patterns(block: int) -> dict[str, Pattern]:
    """Each with what tells it from the others."""
    return {
        "dense": dense.Options(block=block),
        "sliding_window": sliding_window.Options(window=3 * block - 5, block=block),
        "local_blocks": local_blocks.Options(block=block),
        "global_blocks": global_blocks.Options(block=block, horizontal=True),
        "strided": strided.Options(block=block, stride=3),
        "dilated": dilated.Options(block=block),
        "global_local": global_local.Options(block=block, window=block + 4, starts=(5,)),
        "fixed": fixed.Options(block=block, local=2, patterns=2),
        "variable": variable.Options(block=block, local=(1, 3), random=1),
        "bigbird": bigbird.Options(block=block),
        "streaming": streaming.Options(sinks=3, recent=block + 4, block=block),
        "mixed": mixed.Options(block=block, groups=(mixed.Group(heads=1, use=("strided",)), mixed.Group())),
        "document": document.Options(block=block),
    }


def tensors(length: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor, Tensor]:
    """q, k, v and the gradient of the output; that of the log-sum-exp; padding [BATCH, length]."""
    generator = torch.Generator().manual_seed(length)
    wide = [torch.randn(BATCH, length, heads, DIM, generator=generator) for heads in (HEADS, 1, 1, HEADS)]
    padding = torch.rand(BATCH, length, generator=generator) > 0.3
    padding[0, : min(length, 70)] = False
    grad_lse = torch.randn(BATCH, HEADS, length, generator=generator)
    return [tensor.to(dtype).transpose(1, 2) for tensor in wide], grad_lse, padding


def expected(given: list[Tensor], grad_lse: Tensor, allowed: Tensor) -> list[Tensor]:
    """Output, log-sum-exp, gradients of q, k and v by the definition."""
    *inputs, grad = (tensor.to(F64) for tensor in given)
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    scores = q @ k.repeat_interleave(HEADS, 1).mT / DIM**0.5
    empty = ~allowed.any(-1)
    lse = scores.masked_fill(~allowed, -1e300).logsumexp(-1).masked_fill(empty, 0)
    weights = torch.where(allowed, torch.exp(scores - lse[..., None]), 0.0)
    out = weights @ v.repeat_interleave(HEADS, 1)
    gradients = torch.autograd.grad((out * grad).sum() + (lse * grad_lse.to(F64)).sum(), (q, k, v))
    return [out.detach(), lse.detach().masked_fill(empty, float("-inf")), *gradients]


def found(engine: Engine, given: list[Tensor], grad_lse: Tensor, padding: Tensor, lists: BlockLayout) -> list[Tensor]:
    """The same by an implementation."""
    call = Call(lists, DIM**-0.5, padding, None, 0.0, 0)
    q, k, v, grad = given
    out, lse = engine.forward(q, k, v, call)
    return [out, lse, *engine.backward(grad, grad_lse, q, k, v, out, lse, call, False)[:3]]


def error(one: Tensor, other: Tensor) -> float:
    """Of the largest number, and of the norm; infinite where one is -inf and the other is not."""
    finite = torch.isfinite(other)
    if not torch.equal(one[~finite].to(F64), other[~finite]):
        return float("inf")
    off, right = one[finite].to(F64) - other[finite], other[finite]
    if not right.numel() or not (off.any() or right.any()):
        return 0.0
    return max(float(off.abs().max() / right.abs().max()), float(off.norm() / right.norm()))


def worst(name: str, engine: Engine, length: int) -> Iterator[tuple[torch.dtype, str | None, float]]:
    """(dtype, instruction level, error) of a pattern at a length."""
    pattern = patterns(16 if length < 1000 else 128)[name]
    shape = Shape(HEADS, length, length, pattern.block, causal=True)
    ids = torch.arange(length).expand(BATCH, -1) // 61 if pattern.segmented else None
    lists = layout(shape, pattern.region(shape), ids)
    levels = library.LEVELS[: library.LEVELS.index(library.best()) + 1] if "native" in engine.forward.__module__ else ()
    for dtype in (F32, BF16):
        given, grad_lse, padding = tensors(length, dtype)
        allowed = lists.mask().expand(BATCH, HEADS, -1, -1) & padding[:, None, None]
        right = expected(given, grad_lse, allowed)
        for level in levels or (None,):
            with library.using(level) if level else nullcontext():
                made = found(engine, given, grad_lse, padding, lists)
            yield dtype, level, max(map(error, made, right))


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in ENGINES:
        sys.exit(__doc__)
    if sys.argv[1] == "triton":
        if os.environ.get("TRITON_INTERPRET") != "1":
            sys.exit("set TRITON_INTERPRET=1")
        warnings.filterwarnings("ignore", category=RuntimeWarning)  # of integers that wrap, as a hash wants
        from kernels.triton_interpreter import install

        install()
    module = import_module(ENGINES[sys.argv[1]])
    if sys.argv[1] == "triton":  # the interpreter's time is the number of tiles
        module._tiles = lambda q, call: (call.layout.block, call.layout.block)
    bad = 0
    for name in patterns(16):
        since, most = time.monotonic(), {F32: 0.0, BF16: 0.0}
        for length in LENGTHS:
            for dtype, level, off in worst(name, module.ENGINE, length):
                most[dtype] = max(most[dtype], off)
                if not off <= TOLERANCE[dtype]:
                    bad += 1
                    print(f"{name}, {length} tokens, {dtype}, {level or sys.argv[1]}: off by {off:.2g}")
        worsts = ", ".join(f"{str(dtype).removeprefix('torch.')} {off:.1e}" for dtype, off in most.items())
        print(f"{name}: {worsts} ({time.monotonic() - since:.0f} s)", flush=True)
    print(f"{bad} failed" if bad else f"{len(patterns(16))} patterns of {len(LENGTHS)} lengths passed")
    return 1 if bad else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
