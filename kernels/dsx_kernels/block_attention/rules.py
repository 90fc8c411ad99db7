"""Conditions on pairs of tokens: what they make of whole blocks, and the mask they spell out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dsx_kernels.block_attention.layout import BlockLayout

FULL, CAUSAL, WINDOW, SEGMENTS, BITS = 0, 1, 2, 4, 8
"""What a block asks of its pairs: nothing, or the sum of conditions that all have to hold."""


def banded(
    blocks: Tensor, kinds: Tensor, lengths: tuple[int, int, int], causal: bool, window: int | None
) -> tuple[Tensor, Tensor]:
    """Blocks without those in which no pair is in the band, and kinds with the conditions that matter in a block.

    blocks, kinds  [groups, query blocks, key blocks]
    lengths        block, query_len, key_len
    """
    block, query_len, key_len = lengths
    rows = torch.arange(blocks.shape[1])[:, None] * block + key_len - query_len
    columns = torch.arange(blocks.shape[2]) * block
    last_rows, last_columns = (rows + block - 1).clamp(max=key_len - 1), (columns + block - 1).clamp(max=key_len - 1)
    least, most = rows - last_columns, last_rows - columns  # of p - j, and every number between is there
    low, high = least.clone(), most.clone()
    if causal:
        low = low.clamp(min=0)
        kinds = kinds | (least < 0).to(torch.uint8) * CAUSAL
    if window is not None:
        low, high = low.clamp(min=1 - window), high.clamp(max=window - 1)
        beyond = (most >= window) | (least <= -window) & (not causal)
        kinds = kinds | beyond.to(torch.uint8) * WINDOW
    return blocks & (low <= high), kinds


def segmented(blocks: Tensor, kinds: Tensor, block: int, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """The same by segment ids [batch, tokens], for each of the batch: [batch * groups, query blocks, key blocks]."""
    (low, high), (key_low, key_high) = _extremes(queries, block), _extremes(keys, block)
    apart = (high[:, :, None] < key_low[:, None]) | (key_high[:, None] < low[:, :, None])
    alike = (low == high)[:, :, None] & (key_low == key_high)[:, None] & (low[:, :, None] == key_low[:, None])
    blocks = (blocks & ~apart[:, None]).flatten(0, 1)
    return blocks, (kinds | (~alike[:, None]).to(torch.uint8) * SEGMENTS).flatten(0, 1)


def _extremes(segments: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Least and largest id of each block: [batch, blocks]."""
    tokens = segments.shape[1]
    places = torch.arange(-(-tokens // block) * block).clamp(max=tokens - 1)
    within = segments[:, places].reshape(len(segments), -(-tokens // block), block)
    return within.amin(-1), within.amax(-1)


def token_mask(layout: BlockLayout, rows: Tensor, groups: Tensor) -> Tensor:
    """What `BlockLayout.mask` returns, from the row of blocks and the group of each listed block."""
    device, queries, keys = layout.offsets.device, layout.query_len, layout.key_len
    columns = layout.columns.long()

    def spread(values: Tensor) -> Tensor:
        """[groups, query blocks, key blocks] -> [groups, query_len, key_len]"""
        wide = values.repeat_interleave(layout.block, 1)[:, :queries]
        return wide.repeat_interleave(layout.block, 2)[:, :, :keys]

    listed = torch.full((layout.groups, layout.query_blocks, layout.key_blocks), -1, device=device)
    listed[groups, rows, columns] = layout.kinds.long()
    kinds = spread(listed)
    position = torch.arange(queries, device=device)[:, None] + keys - queries
    distance = position - torch.arange(keys, device=device)
    allowed = (kinds >= 0) & ((kinds & CAUSAL == 0) | (distance >= 0))
    allowed &= (kinds & WINDOW == 0) | (distance.abs() < layout.windows[:, None, None])
    if layout.masks.numel():
        chosen = torch.zeros_like(listed)
        chosen[groups, rows, columns] = layout.masks.long()
        allowed &= (kinds & BITS == 0) | _bits(layout, spread(chosen))
    kinds, allowed = kinds[layout.heads.long()], allowed[layout.heads.long()]
    if not layout.query_segments.shape[1] or not layout.key_segments.shape[1]:
        return allowed
    same = layout.query_segments[:, :, None] == layout.key_segments[:, None]
    return allowed & ((kinds & SEGMENTS == 0) | (same[0] if len(same) == 1 else same[:, None]))


def _bits(layout: BlockLayout, chosen: Tensor) -> Tensor:
    """Each pair's bit in the mask that is chosen for its block."""
    row = torch.arange(layout.query_len, device=chosen.device)[:, None] % layout.block
    column = torch.arange(layout.key_len, device=chosen.device) % layout.block
    return (layout.bits[chosen.clamp(min=0), row, column // 8] >> (column % 8) & 1).bool()
