"""What the Triton kernels of `block_attention` share: tiles in memory, scores of a tile, pairs that dropout keeps.

A tile of ROWS queries and COLUMNS keys lies within one block of the layout. Scores are in powers of two. Where a tile
begins is counted in 64 bits, places within it in 32: half the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def load_rows(
    data: tl.tensor, first: tl.tensor, stride: tl.tensor, count: tl.tensor, ROWS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[ROWS, WIDTH] from token `first`, zeros beyond `count` tokens and DIM elements."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < (count - first).to(tl.int32))[:, None]
    if DIM != WIDTH:
        inside &= (column < DIM)[None, :]
    return tl.load(data + first * stride + (row[:, None] * stride + column[None, :]), mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def store_rows(
    data: tl.tensor, first: tl.tensor, stride: tl.tensor, count: tl.tensor, values: tl.tensor, ROWS: tl.constexpr,
    DIM: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """[ROWS, WIDTH] to the tokens from `first`."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = (row < (count - first).to(tl.int32))[:, None]
    if DIM != WIDTH:
        inside &= (column < DIM)[None, :]
    made = values.to(data.dtype.element_ty)
    tl.store(data + first * stride + (row[:, None] * stride + column[None, :]), made, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def score(
    q: tl.tensor, k: tl.tensor, scale: tl.tensor, batch: tl.tensor, head: tl.tensor, first: tl.tensor, at: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, kind: tl.tensor, window: tl.tensor, mask: tl.tensor,
    padding: tl.tensor, bias: tl.tensor, bias_batch: tl.tensor, bias_head: tl.tensor, bias_query: tl.tensor,
    query_segments: tl.tensor, query_segments_batch: tl.tensor, key_segments: tl.tensor,
    key_segments_batch: tl.tensor, bits: tl.tensor, BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[ROWS, COLUMNS] of q kᵀ scale log2(e), with the bias; -inf where a pair may not attend.

    first, at  position of the first query, and of the first key

    Rows beyond the last query are left as they come: masks of lanes are scarce registers on AMD.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    query_inside, key_inside = row < (queries - first).to(tl.int32), column < (keys - at).to(tl.int32)
    distance = (first + keys - queries - at).to(tl.int32) + row[:, None] - column[None, :]
    FAR: tl.constexpr = 1 << 30
    reach = tl.where((kind & 2) == 0, FAR, tl.minimum(window, FAR))
    least = tl.where((kind & 1) == 0, 1 - reach, 0)
    allowed = key_inside[None, :] & (distance >= least) & (distance < reach)
    if bias is not None:
        inside = query_inside[:, None] & key_inside[None, :]
        bias += batch * bias_batch + head * bias_head + first * bias_query + at
        added = tl.load(bias + (row[:, None] * bias_query + column[None, :]), mask=inside, other=0.0)
        scores += added.to(tl.float32) * LOG2_E
    if padding is not None:
        allowed &= (tl.load(padding + batch * keys + at + column, mask=key_inside, other=0) != 0)[None, :]
    if query_segments is not None:
        one = tl.load(query_segments + batch * query_segments_batch + first + row, mask=query_inside, other=0)
        other = tl.load(key_segments + batch * key_segments_batch + at + column, mask=key_inside, other=0)
        allowed &= ((kind & 4) == 0) | (one[:, None] == other[None, :])
    if bits is not None:
        # a tile lies within a block, and its first column is a multiple of 8
        bits += (tl.maximum(mask, 0) * BLOCK + first % BLOCK) * (BLOCK // 8) + at % BLOCK // 8
        byte = tl.load(bits + (row[:, None] * (BLOCK // 8) + column[None, :] // 8))
        allowed &= ((kind & 8) == 0) | (((byte.to(tl.int32) >> (column % 8)[None, :]) & 1) != 0)
    return tl.where(allowed, scores, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _mixed(x: tl.tensor) -> tl.tensor:
    x = (x ^ (x >> 16)) * tl.full((), 0x85EBCA6B, tl.uint32)
    x = (x ^ (x >> 13)) * tl.full((), 0xC2B2AE35, tl.uint32)
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def keep(
    head: tl.tensor, first: tl.tensor, at: tl.tensor, seed: tl.tensor, threshold: tl.tensor, kept: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What dropout multiplies pairs by, as dropout.py says; head: counted through the batch."""
    start = _mixed(seed.to(tl.uint32) + head.to(tl.uint32))
    row = _mixed(start + (first.to(tl.uint32) + tl.arange(0, ROWS).to(tl.uint32)))
    column = (at.to(tl.uint32) + tl.arange(0, COLUMNS).to(tl.uint32)) * tl.full((), 0x9E3779B9, tl.uint32)
    made = _mixed(row[:, None] ^ column[None, :])
    return tl.where(made.to(tl.int64) >= threshold, kept, 0.0)
