"""The forward pass of `block_attention` by Triton: online softmax over a row's list of blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from dsx_kernels.block_attention.triton_blocks import keep, load_rows, score, store_rows


@triton.jit  # type: ignore[untyped-decorator]
def forward(
    q: tl.tensor, q_batch: tl.tensor, q_head: tl.tensor, q_token: tl.tensor,
    k: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor, k_token: tl.tensor,
    v: tl.tensor, v_batch: tl.tensor, v_head: tl.tensor, v_token: tl.tensor,
    out: tl.tensor, out_batch: tl.tensor, out_head: tl.tensor, out_token: tl.tensor,
    lse: tl.tensor,
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
    PARTS: tl.constexpr = BLOCK // COLUMNS
    first = tl.program_id(0).to(tl.int64) * ROWS
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    group = tl.load(groups + batch * groups_batch + head).to(tl.int64)
    window = tl.load(windows + group)
    rows = load_rows(q + batch * q_batch + head * q_head, first, q_token, queries, ROWS, DIM, WIDTH)
    k += batch * k_batch + (head // share) * k_head
    v += batch * v_batch + (head // share) * v_head

    most = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    place = offsets + group * (query_blocks + 1) + first // BLOCK
    start, stop = tl.load(place), tl.load(place + 1)
    for step in range(start * PARTS, stop * PARTS):
        entry = step // PARTS
        at = tl.load(columns + entry).to(tl.int64) * BLOCK + step % PARTS * COLUMNS
        if at < keys:
            mask = tl.load(masks + entry).to(tl.int64) if masks is not None else 0
            scores = score(
                rows, load_rows(k, at, k_token, keys, COLUMNS, DIM, WIDTH), scale, batch, head, first, at,
                queries, keys, tl.load(kinds + entry).to(tl.int32), window, mask, padding, bias, bias_batch, bias_head,
                bias_query, query_segments, query_segments_batch, key_segments, key_segments_batch, bits, BLOCK,
                ROWS, COLUMNS,
            )  # fmt: skip
            now = tl.maximum(most, tl.max(scores, axis=1))
            base = tl.where(now == float("-inf"), 0.0, now)
            weights = tl.exp2(scores - base[:, None])
            fade = tl.exp2(most - base)
            total = total * fade + tl.sum(weights, axis=1)
            if DROP:
                weights *= keep(batch * heads + head, first, at, seed, threshold, kept, ROWS, COLUMNS)
            values = load_rows(v, at, v_token, keys, COLUMNS, DIM, WIDTH)
            sums = tl.dot(weights.to(values.dtype), values, sums * fade[:, None], input_precision="ieee")
            most = now
    empty = total == 0
    made = sums / tl.where(empty, 1.0, total)[:, None]
    store_rows(out + batch * out_batch + head * out_head, first, out_token, queries, made, ROWS, DIM, WIDTH)
    LN_2: tl.constexpr = 0.6931471805599453
    logs = tl.where(empty, float("-inf"), (most + tl.log2(tl.where(empty, 1.0, total))) * LN_2)
    row = tl.arange(0, ROWS)
    lse += (batch * heads + head) * queries + first
    tl.store(lse + row, logs, mask=row < (queries - first).to(tl.int32))
