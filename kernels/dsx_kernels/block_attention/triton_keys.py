"""Gradients of keys and values of `block_attention` by Triton: columns of blocks, by the transposed lists."""

from __future__ import annotations

import triton
import triton.language as tl

from dsx_kernels.block_attention.triton_blocks import keep, load_rows, score, store_rows


@triton.jit  # type: ignore[untyped-decorator]
def grad_keys(
    q: tl.tensor, q_batch: tl.tensor, q_head: tl.tensor, q_token: tl.tensor,
    k: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor, k_token: tl.tensor,
    v: tl.tensor, v_batch: tl.tensor, v_head: tl.tensor, v_token: tl.tensor,
    grad: tl.tensor, grad_batch: tl.tensor, grad_head: tl.tensor, grad_token: tl.tensor,
    grad_k: tl.tensor, grad_k_batch: tl.tensor, grad_k_head: tl.tensor, grad_k_token: tl.tensor,
    grad_v: tl.tensor, grad_v_batch: tl.tensor, grad_v_head: tl.tensor, grad_v_token: tl.tensor,
    lse: tl.tensor, delta: tl.tensor,
    column_offsets: tl.tensor, rows: tl.tensor, entries: tl.tensor, kinds: tl.tensor, groups: tl.tensor,
    groups_batch: tl.tensor, windows: tl.tensor, masks: tl.tensor,
    padding: tl.tensor, bias: tl.tensor, bias_batch: tl.tensor, bias_head: tl.tensor, bias_query: tl.tensor,
    query_segments: tl.tensor, query_segments_batch: tl.tensor, key_segments: tl.tensor,
    key_segments_batch: tl.tensor, bits: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, heads: tl.tensor, share: tl.tensor, key_blocks: tl.tensor,
    scale: tl.float32, kept: tl.float32, threshold: tl.int64, seed: tl.int64,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    DROP: tl.constexpr,
) -> None:  # fmt: skip
    LOG2_E: tl.constexpr = 1.4426950408889634
    PARTS: tl.constexpr = BLOCK // ROWS
    first = tl.program_id(0).to(tl.int64) * COLUMNS
    key_head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, ROWS)
    tokens = load_rows(k + batch * k_batch + key_head * k_head, first, k_token, keys, COLUMNS, DIM, WIDTH)
    values = load_rows(v + batch * v_batch + key_head * v_head, first, v_token, keys, COLUMNS, DIM, WIDTH)
    key_sums = tl.zeros((COLUMNS, WIDTH), tl.float32)
    value_sums = tl.zeros((COLUMNS, WIDTH), tl.float32)
    for head in range(key_head * share, (key_head + 1) * share):
        group = tl.load(groups + batch * groups_batch + head).to(tl.int64)
        window = tl.load(windows + group)
        q_here, grad_here = q + batch * q_batch + head * q_head, grad + batch * grad_batch + head * grad_head
        place = column_offsets + group * (key_blocks + 1) + first // BLOCK
        start, stop = tl.load(place), tl.load(place + 1)
        for step in range(start * PARTS, stop * PARTS):
            entry = tl.load(entries + step // PARTS)
            at = tl.load(rows + step // PARTS).to(tl.int64) * BLOCK + step % PARTS * ROWS
            if at < queries:
                inside = row < (queries - at).to(tl.int32)
                line = (batch * heads + head) * queries + at
                shift = tl.load(lse + line + row, mask=inside, other=float("-inf"))
                shift = tl.where(shift == float("-inf"), float("inf"), shift * LOG2_E)
                deltas = tl.load(delta + line + row, mask=inside, other=0.0)
                mask = tl.load(masks + entry).to(tl.int64) if masks is not None else 0
                tile = load_rows(q_here, at, q_token, queries, ROWS, DIM, WIDTH)
                scores = score(
                    tile, tokens, scale, batch, head, at, first,
                    queries, keys, tl.load(kinds + entry).to(tl.int32), window, mask, padding, bias, bias_batch,
                    bias_head, bias_query, query_segments, query_segments_batch, key_segments, key_segments_batch,
                    bits, BLOCK, ROWS, COLUMNS,
                )  # fmt: skip
                weights = tl.where(inside[:, None], tl.exp2(scores - shift[:, None]), 0.0)
                grads = load_rows(grad_here, at, grad_token, queries, ROWS, DIM, WIDTH)
                products = tl.dot(grads, tl.trans(values), input_precision="ieee")
                given = weights
                if DROP:
                    factor = keep(batch * heads + head, at, first, seed, threshold, kept, ROWS, COLUMNS)
                    products *= factor
                    given = weights * factor
                slopes = weights * (products - deltas[:, None]) * scale
                value_sums = tl.dot(tl.trans(given.to(grads.dtype)), grads, value_sums, input_precision="ieee")
                key_sums = tl.dot(tl.trans(slopes.to(tile.dtype)), tile, key_sums, input_precision="ieee")
    grad_k += batch * grad_k_batch + key_head * grad_k_head
    grad_v += batch * grad_v_batch + key_head * grad_v_head
    store_rows(grad_k, first, grad_k_token, keys, key_sums, COLUMNS, DIM, WIDTH)
    store_rows(grad_v, first, grad_v_token, keys, value_sums, COLUMNS, DIM, WIDTH)
