"""From a region to the lists of blocks that `block_attention` walks."""

from __future__ import annotations

import torch
from attrs import evolve
from torch import Tensor

from dsx_kernels.block_attention import BlockLayout
from dsx_sparse.region import Region, Shape, between

_PAIRS = 1 << 24
"""Pairs looked at together: 16 MB of answers, and some times that of work."""


def layout(shape: Shape, region: Region, segments: Tensor | None = None) -> BlockLayout:
    """The lists of `region`, each pair exact.

    segments  int [batch, keys]: only tokens of one segment see each other, too
    """
    touched, masks, bits = _exact(shape, _earlier(shape, region) if shape.causal else region)
    alike = torch.arange(shape.heads) * (len(touched) > 1)
    ids = None if segments is None else segments.detach().to("cpu")
    return BlockLayout.from_blocks(
        touched,
        block=shape.block,
        query_len=shape.queries,
        key_len=shape.keys,
        heads=(alike if region.heads is None else region.heads).to(torch.int32),
        causal=shape.causal,
        query_segments=None if ids is None else ids[:, shape.keys - shape.queries :],
        key_segments=ids,
        masks=masks,
        bits=bits,
    )


def _earlier(shape: Shape, region: Region) -> Region:
    """Without the blocks in which every key is later than every query: nobody need look at their pairs."""
    here = shape.positions()
    return evolve(region, touched=region.touched & between(shape, here * 0, here + 1).touched)


def _exact(shape: Shape, region: Region) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The blocks in which some pair is allowed; and for those in which not all are, which."""
    touched = region.touched.clone()
    partial = (touched & ~region.full).nonzero()
    if not len(partial):
        return touched, None, None
    masks = torch.full(touched.shape, -1, dtype=torch.int32)
    kept, packed = [], []
    for some in torch.split(partial, max(1, _PAIRS // shape.block**2)):
        allowed, inside = _pairs(shape, region, some)
        nothing, all_of_them = ~allowed.any(-1), (allowed | ~inside).all(-1)
        touched[tuple(some[nothing].T)] = False
        rest = ~(nothing | all_of_them)
        kept.append(some[rest])
        packed.append(_packed(allowed[rest]))
    places, rows = torch.cat(kept), torch.cat(packed)
    if not len(places):
        return touched, None, None
    bits, numbers = torch.unique(rows, dim=0, return_inverse=True)
    masks[tuple(places.T)] = numbers.to(torch.int32)
    return touched, masks, bits.reshape(-1, shape.block, shape.block // 8)


def _pairs(shape: Shape, region: Region, places: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each pair of these blocks is allowed, and whether there is such a pair: bool [n, block * block]."""
    within = torch.arange(shape.block)
    query = places[:, 1, None, None] * shape.block + within[:, None]
    key = places[:, 2, None, None] * shape.block + within
    inside = (query < shape.queries) & (key < shape.keys)
    allowed = region.allows(places[:, 0, None, None], query.clamp(max=shape.queries - 1), key.clamp(max=shape.keys - 1))
    return (allowed & inside).flatten(1), inside.flatten(1)


def _packed(allowed: Tensor) -> Tensor:
    """Bits to bytes, the first in the lowest place."""
    powers = 2 ** torch.arange(8, dtype=torch.uint8)
    return (allowed.view(len(allowed), -1, 8).to(torch.uint8) * powers).sum(-1, dtype=torch.uint8)
