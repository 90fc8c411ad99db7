"""Which blocks of the score matrix there are, and which of their pairs may attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from dsx_kernels.block_attention.rules import BITS, SEGMENTS, banded, segmented, token_mask

BLOCKS = (16, 32, 64, 128)
"""Tokens of a block."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """Blocks of the score matrix as sorted lists for each head group and row of blocks (CSR).

    Query i sits at key position p = i + key_len - query_len: the last query sees the last key. A pair (i, j) may attend
    if its block is listed and every condition of the block's kind holds:

        CAUSAL    j <= p
        WINDOW    |p - j| < window of the head group
        SEGMENTS  query_segments[i] == key_segments[j]
        BITS      bit j % 8 of bits[mask of the block, i % block, j % block // 8]

    block           tokens of a block: 16, 32, 64 or 128
    offsets         int32 [groups, query blocks + 1]: the list of row r is [offsets[g, r], offsets[g, r + 1])
    columns         int32 [n], key blocks, ascending in each list
    kinds           uint8 [n], FULL or a sum of CAUSAL, WINDOW, SEGMENTS and BITS
    heads           int32 [heads] or [batch, heads], the group of each head
    windows         int32 [groups]; 0 where no block has WINDOW
    query_segments  int32 [batch or 1, query_len], key_segments int32 [batch or 1, key_len]; empty if none
    masks           int32 [n], which of `bits` belongs to a block with BITS; empty if none
    bits            uint8 [masks, block, block / 8]; empty if none

    The transposed lists (column_offsets [groups, key blocks + 1], rows [n], entries [n]: the place of a block in
    `columns`) are made once, here. `ValueError` for lists that contradict each other.
    """

    block: int
    query_len: int
    key_len: int
    offsets: Tensor
    columns: Tensor
    kinds: Tensor
    heads: Tensor
    windows: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    query_segments: Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.int32))
    key_segments: Tensor = field(default_factory=lambda: torch.zeros(1, 0, dtype=torch.int32))
    masks: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int32))
    bits: Tensor = field(default_factory=lambda: torch.zeros(0, 0, 0, dtype=torch.uint8))
    column_offsets: Tensor = field(init=False, repr=False)
    rows: Tensor = field(init=False, repr=False)
    entries: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.windows.numel() == 0:
            object.__setattr__(self, "windows", torch.zeros_like(self.offsets[:, 0]))
        _check(self)
        rows, groups = self.places()
        blocks = self.key_blocks
        order = torch.argsort((groups * blocks + self.columns) * self.query_blocks + rows)
        counts = torch.bincount(groups * blocks + self.columns, minlength=self.groups * blocks)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        starts = torch.arange(self.groups, device=ends.device)[:, None] * blocks
        places = starts + torch.arange(blocks + 1, device=ends.device)
        object.__setattr__(self, "column_offsets", ends[places].to(torch.int32))
        object.__setattr__(self, "rows", rows[order].to(torch.int32))
        object.__setattr__(self, "entries", order.to(torch.int32))

    @property
    def groups(self) -> int:
        return self.offsets.shape[0]

    @property
    def query_blocks(self) -> int:
        return -(-self.query_len // self.block)

    @property
    def key_blocks(self) -> int:
        return -(-self.key_len // self.block)

    @classmethod
    def from_blocks(
        cls,
        blocks: Tensor,
        *,
        block: int,
        query_len: int,
        key_len: int,
        heads: Tensor | Sequence[int],
        causal: bool = False,
        window: int | None = None,
        query_segments: Tensor | None = None,
        key_segments: Tensor | None = None,
        masks: Tensor | None = None,
        bits: Tensor | None = None,
    ) -> BlockLayout:
        """A layout of the blocks that are wanted, under rules that hold for all of them.

        blocks          bool [groups, query blocks, key blocks]
        heads           int32 [heads], the group of each
        causal, window  see BlockLayout; blocks in which no pair is left are dropped, those in which all are become full
        query_segments  int [query_len] or [batch, query_len]; a batch multiplies the groups
        key_segments    alike; the same as query_segments if not given
        masks, bits     see BlockLayout; masks int32 [groups, query blocks, key blocks], -1 for none
        """
        heads = torch.as_tensor(heads, dtype=torch.int32)
        kinds = torch.zeros(blocks.shape, dtype=torch.uint8)
        if masks is not None:
            kinds |= (masks >= 0).to(torch.uint8) * BITS
        blocks, kinds = banded(blocks, kinds, (block, query_len, key_len), causal, window)
        more: dict[str, Tensor] = {}
        if query_segments is not None:
            queries = _two_dims(query_segments)
            keys = queries if key_segments is None else _two_dims(key_segments)
            if len(queries) > 1:
                heads = torch.arange(len(queries), dtype=torch.int32)[:, None] * len(blocks) + heads
            masks = masks if masks is None else masks.repeat(len(queries), 1, 1)
            blocks, kinds = segmented(blocks, kinds, block, queries, keys)
            more = {"query_segments": queries, "key_segments": keys}
        groups, rows, columns = blocks.nonzero(as_tuple=True)
        if masks is not None and bits is not None:
            more |= {"masks": masks[groups, rows, columns].to(torch.int32), "bits": bits}
        counts = blocks.sum(-1)
        ends = torch.cat([counts.new_zeros(1), counts.flatten().cumsum(0)])
        places = torch.arange(len(blocks))[:, None] * blocks.shape[1] + torch.arange(blocks.shape[1] + 1)
        return cls(
            block,
            query_len,
            key_len,
            offsets=ends[places].to(torch.int32),
            columns=columns.to(torch.int32),
            kinds=kinds[groups, rows, columns],
            heads=heads,
            windows=torch.full((len(blocks),), window or 0, dtype=torch.int32),
            **more,
        )

    def to(self, device: torch.device | str) -> BlockLayout:
        """The same layout on another device; itself if it is there."""
        if self.offsets.device == torch.device(device):
            return self
        sizes = (self.block, self.query_len, self.key_len)
        return self.of_tensors(sizes, [tensor.to(device) for tensor in self.tensors()])

    def tensors(self) -> list[Tensor]:
        """Its tensors in the order of the fields, for `of_tensors`."""
        return [value for each in fields(self) if isinstance(value := getattr(self, each.name), Tensor)]

    @classmethod
    def of_tensors(cls, sizes: Sequence[int], tensors: Sequence[Tensor]) -> BlockLayout:
        """A layout of its block, query_len, key_len and `tensors()`, which are not checked again."""
        layout = object.__new__(cls)
        for each, value in zip(fields(cls), (*sizes, *tensors), strict=True):
            object.__setattr__(layout, each.name, value)
        return layout

    def mask(self) -> Tensor:
        """The pairs that may attend: bool [heads, query_len, key_len], or [batch, heads, ...] if batches differ."""
        rows, groups = self.places()
        return token_mask(self, rows, groups)

    def places(self) -> tuple[Tensor, Tensor]:
        """Row of blocks, and head group, of each entry of the lists: int64 [n]."""
        counts = self.offsets.diff(dim=1).flatten().long()
        rows = torch.arange(self.query_blocks, device=counts.device).repeat(self.groups)
        groups = torch.arange(self.groups, device=counts.device).repeat_interleave(self.query_blocks)
        return rows.repeat_interleave(counts), groups.repeat_interleave(counts)


def _two_dims(segments: Tensor) -> Tensor:
    """[tokens] or [batch, tokens] -> int32 [batch, tokens]"""
    return (segments if segments.dim() == 2 else segments[None]).to(torch.int32)


def _check(layout: BlockLayout) -> None:
    """`ValueError` that names the list, unless all fit together."""
    _demand(layout.block in BLOCKS, f"blocks of {layout.block} tokens; there are {', '.join(map(str, BLOCKS))}")
    for name in ("offsets", "columns", "heads", "windows", "query_segments", "key_segments", "masks"):
        dtype = getattr(layout, name).dtype
        _demand(dtype == torch.int32, f"{name} are {dtype}, not torch.int32")
    for name in ("kinds", "bits"):
        dtype = getattr(layout, name).dtype
        _demand(dtype == torch.uint8, f"{name} are {dtype}, not torch.uint8")
    _check_lists(layout)
    _check_conditions(layout)


def _check_lists(layout: BlockLayout) -> None:
    offsets, heads, listed = layout.offsets, layout.heads, layout.columns.numel()
    wanted = [layout.groups, layout.query_blocks + 1]
    _demand(layout.groups > 0, "no head group")
    _demand(list(offsets.shape) == wanted, f"offsets are {list(offsets.shape)}, not {wanted} for these lengths")
    _demand(layout.kinds.numel() == listed, f"{layout.kinds.numel()} kinds for {listed} columns")
    ends = torch.cat([offsets.new_zeros(1), offsets[:, -1]])
    whole = torch.equal(ends[:-1], offsets[:, 0]) and int(ends[-1]) == listed
    _demand(whole and bool((offsets.diff(dim=1) >= 0).all()), "offsets do not cut the columns into list after list")
    inside = (layout.columns >= 0) & (layout.columns < layout.key_blocks)
    _demand(bool(inside.all()), f"a column is not among {layout.key_blocks} key blocks")
    rows, groups = layout.places()
    places = (groups * layout.query_blocks + rows) * layout.key_blocks + layout.columns
    _demand(bool((places.diff() > 0).all()), "columns are not ascending in each list")
    known = heads.dim() in (1, 2) and bool(((heads >= 0) & (heads < layout.groups)).all())
    _demand(known, f"heads {list(heads.shape)} name a group that is not among {layout.groups}")


def _check_conditions(layout: BlockLayout) -> None:
    _demand(not bool((layout.kinds >= 2 * BITS).any()), "a kind has an unknown condition")
    _demand(list(layout.windows.shape) == [layout.groups], f"windows are {list(layout.windows.shape)}, not one a group")
    if bool((layout.kinds & SEGMENTS).any()):
        queries, keys = layout.query_segments.shape, layout.key_segments.shape
        alike = (queries[0], queries[1], keys[1]) == (keys[0], layout.query_len, layout.key_len)
        _demand(
            alike, f"segments are {list(queries)} and {list(keys)} for {layout.query_len} and {layout.key_len} tokens"
        )
    asked = (layout.kinds & BITS).bool()
    if bool(asked.any()):
        masks, shape = layout.masks, list(layout.bits.shape)
        wanted = [layout.block, layout.block // 8]
        _demand(shape[1:] == wanted, f"bits are {shape}, not [masks, {', '.join(map(str, wanted))}]")
        known = masks.shape == layout.columns.shape and bool(((masks >= 0) & (masks < shape[0]))[asked].all())
        _demand(known, f"masks {list(masks.shape)} do not name one of {shape[0]} for each block with BITS")


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"block layout: {what}")
