"""Gradients of queries and bias of `block_attention` by Triton; each query's delta is made here, too."""

from __future__ import annotations

import triton
import triton.language as tl

from dsx_kernels.block_attention.triton_blocks import keep, load_rows, score, store_rows


@triton.jit  # type: ignore[untyped-decorator]
def grad_queries(
    q: tl.tensor, q_batch: tl.tensor, q_head: tl.tensor, q_token: tl.tensor,
    k: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor, k_token: tl.tensor,
    v: tl.tensor, v_batch: tl.tensor, v_head: tl.tensor, v_token: tl.tensor,
    out: tl.tensor, out_batch: tl.tensor, out_head: tl.tensor, out_token: tl.tensor,
    grad: tl.tensor, grad_batch: tl.tensor, grad_head: tl.tensor, grad_token: tl.tensor,
    grad_q: tl.tensor, grad_q_batch: tl.tensor, grad_q_head: tl.tensor, grad_q_token: tl.tensor,
    lse: tl.tensor, grad_lse: tl.tensor, delta: tl.tensor, grad_bias: tl.tensor,
    offsets: tl.tensor, columns: tl.tensor, kinds: tl.tensor, groups: tl.tensor, groups_batch: tl.tensor,
    windows: tl.tensor, masks: tl.tensor,
    padding: tl.tensor, bias: tl.tensor, bias_batch: tl.tensor, bias_head: tl.tensor, bias_query: tl.tensor,
    query_segments: tl.tensor, query_segments_batch: tl.tensor, key_segments: tl.tensor,
    key_segments_batch: tl.tensor, bits: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, share: tl.tensor, query_blocks: tl.tensor,
    scale: tl.float32, kept: tl.float32, threshold: tl.int64, seed: tl.int64,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    DROP: tl.constexpr,
) -> None:  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    PARTS: tl.constexpr = BLOCK // COLUMNS
    first = tl.program_id(0).to(tl.int64) * ROWS
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = tl.load(groups + batch * groups_batch + head).to(tl.int64)
    window = tl.load(windows + group)
    row = tl.arange(0, ROWS)
    inside = row < (queries - first).to(tl.int32)
    rows = load_rows(q + batch * q_batch + head * q_head, first, q_token, queries, ROWS, DIM, WIDTH)
    grads = load_rows(grad + batch * grad_batch + head * grad_head, first, grad_token, queries, ROWS, DIM, WIDTH)
    made = load_rows(out + batch * out_batch + head * out_head, first, out_token, queries, ROWS, DIM, WIDTH)
    k += batch * k_batch + (head // share) * k_head
    v += batch * v_batch + (head // share) * v_head

    line = (batch * heads + head) * queries + first
    deltas = tl.sum(grads.to(tl.float32) * made.to(tl.float32), axis=1)
    if grad_lse is not None:
        deltas -= tl.load(grad_lse + line + row, mask=inside, other=0.0)
    tl.store(delta + line + row, deltas, mask=inside)
    shift = tl.load(lse + line + row, mask=inside, other=float("-inf"))
    shift = tl.where(shift == float("-inf"), float("inf"), shift * LOG2_E)

    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    place = offsets + group * (query_blocks + 1) + first // BLOCK
    start, stop = tl.load(place), tl.load(place + 1)
    for step in range(start * PARTS, stop * PARTS):
        entry = step // PARTS
        at = tl.load(columns + entry).to(tl.int64) * BLOCK + step % PARTS * COLUMNS
        if at < keys:
            mask = tl.load(masks + entry).to(tl.int64) if masks is not None else 0
            tokens = load_rows(k, at, k_token, keys, COLUMNS, DIM, WIDTH)
            scores = score(
                rows, tokens, scale, batch, head, first, at,
                queries, keys, tl.load(kinds + entry).to(tl.int32), window, mask, padding, bias, bias_batch, bias_head,
                bias_query, query_segments, query_segments_batch, key_segments, key_segments_batch, bits, BLOCK,
                ROWS, COLUMNS,
            )  # fmt: skip
            weights = tl.exp2(scores - shift[:, None])
            values = load_rows(v, at, v_token, keys, COLUMNS, DIM, WIDTH)
            products = tl.dot(grads, tl.trans(values), input_precision="ieee")
            if DROP:
                products *= keep(batch * heads + head, first, at, seed, threshold, kept, ROWS, COLUMNS)
            slopes = weights * (products - deltas[:, None])
            if grad_bias is not None:
                column = tl.arange(0, COLUMNS)
                pairs = inside[:, None] & (column < (keys - at).to(tl.int32))[None, :]
                tl.store(grad_bias + line * keys + at + (row[:, None] * keys + column[None, :]), slopes, mask=pairs)
            sums = tl.dot((slopes * scale).to(tokens.dtype), tokens, sums, input_precision="ieee")
    store_rows(grad_q + batch * grad_q_batch + head * grad_q_head, first, grad_q_token, queries, sums, ROWS, DIM, WIDTH)
