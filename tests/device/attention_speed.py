"""`block_attention` against torch's dense attention on this device: time and memory of both passes."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from device.part import Checks, Figures
from device.speed import times
from dsx_kernels.block_attention import BlockLayout, block_attention

LENGTHS = {"cuda": (2048, 4096, 8192, 16384, 32768, 65536), "cpu": (256,)}
DENSE = 16384
"""The longest sequence that dense attention by our kernels is given."""
BATCH, HEADS, BLOCK, WINDOW = 4, 8, 128, 4

Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def checks(device: str, argument: str | None) -> Checks:
    """Causal, 8 heads; ours sees a window of 4 blocks and the first one, or all."""
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (64, 128):
            for length in LENGTHS[device]:
                words = f"{str(dtype).removeprefix('torch.')}, heads of {dim}, {length} tokens"
                yield words, partial(_compare, device, dtype, dim, length)


def _compare(device: str, dtype: torch.dtype, dim: int, length: int) -> Figures:
    """Milliseconds and MiB of each way, and how many times faster ours are."""
    ways: dict[str, Way] = {"torch": partial(scaled_dot_product_attention, is_causal=True)}
    ways |= {"pattern": _ours(device, length, dense=False)}
    if length <= DENSE:
        ways["dense"] = _ours(device, length, dense=True)
    tensors = [torch.randn(BATCH, HEADS, length, dim, device=device).to(dtype) for _ in range(4)]
    inputs = [tensor.requires_grad_() for tensor in tensors[:3]]

    def both(way: Way) -> None:
        torch.autograd.grad(way(*inputs), inputs, tensors[3])

    found = {name: statistics.median(times(partial(both, way), device, 5, 3)) for name, way in ways.items()}
    figures: dict[str, float] = {f"{name} ms": round(1e3 * seconds, 3) for name, seconds in found.items()}
    figures |= {f"{name} is faster by": round(found["torch"] / found[name], 2) for name in found if name != "torch"}
    if device == "cuda":
        figures |= {f"{name} MiB": _memory(partial(both, way)) for name, way in ways.items()}
    return figures


def _ours(device: str, length: int, dense: bool) -> Way:
    row, column = torch.arange(length // BLOCK)[:, None], torch.arange(length // BLOCK)
    blocks = ((row - column < WINDOW) | (column == 0) | dense)[None]
    layout = BlockLayout.from_blocks(
        blocks, block=BLOCK, query_len=length, key_len=length, heads=[0] * HEADS, causal=True
    ).to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = block_attention(q, k, v, layout)
        assert isinstance(out, Tensor)
        return out

    return attend


def _memory(run: Callable[[], None]) -> int:
    """MiB that a call adds at most."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return math.ceil((torch.cuda.max_memory_allocated() - before) / 2**20)
