"""Which keys each query may attend to: exact for every pair of tokens, and known for whole blocks at once.

A region is made by `between` or `blocks` and combined by `|`, `&` and `mix`. What it says of blocks may be cautious, a
block in which all or no pairs are allowed said to have some: `layout` looks at each pair of those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from attrs import frozen
from torch import Tensor

Allows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(group of heads, query, key): int64 and broadcastable -> whether the pair may attend, bool."""


@frozen
class Shape:
    """What a pattern is asked for.

    heads    of the queries
    queries  tokens; the last query sits where the last key does, so that a cache of earlier keys is a longer `keys`
    keys     tokens
    block    tokens of a block
    causal   whether a query sees no later key; the layout sees to that, a pattern may look as it likes to the right
    """

    heads: int
    queries: int
    keys: int
    block: int
    causal: bool

    @property
    def columns(self) -> int:
        """Blocks of keys, and of the positions that queries may have."""
        return -(-self.keys // self.block)

    def positions(self) -> Tensor:
        """Place of each query among the keys, int64 [queries]."""
        return torch.arange(self.queries) + self.keys - self.queries


@frozen(eq=False)
class Region:
    """A set of pairs (query, key) for each group of heads; one group is alike for all heads.

    touched  bool [groups, query blocks, key blocks]: nothing is allowed in any other block
    full     bool, alike: everything is allowed in these
    allows   for single pairs
    heads    group of each head, int64 [heads]; None: one each, or the only one
    """

    touched: Tensor
    full: Tensor
    allows: Allows
    heads: Tensor | None = None

    def __or__(self, other: Region) -> Region:
        return Region(
            self.touched | other.touched,
            self.full | other.full,
            lambda group, query, key: self.allows(group, query, key) | other.allows(group, query, key),
            self.heads if other.heads is None else other.heads,
        )

    def __and__(self, other: Region) -> Region:
        return Region(
            self.touched & other.touched,
            self.full & other.full,
            lambda group, query, key: self.allows(group, query, key) & other.allows(group, query, key),
            self.heads if other.heads is None else other.heads,
        )


def between(shape: Shape, low: Tensor, high: Tensor) -> Region:
    """Keys low <= j < high of each query, int64 [queries]."""
    first = torch.arange(shape.columns) * shape.block
    last = (first + shape.block).clamp(max=shape.keys)
    lows, highs = _rows(shape, low), _rows(shape, high)
    touched = (first < highs.amax(1, keepdim=True)) & (last > lows.amin(1, keepdim=True))
    full = (first >= lows.amax(1, keepdim=True)) & (last <= highs.amin(1, keepdim=True))
    return Region(touched[None], full[None], lambda group, query, key: (low[query] <= key) & (key < high[query]))


def blocks(shape: Shape, matrix: Tensor) -> Region:
    """Whole blocks: bool [groups, n, n] for n blocks of positions (of queries) and of keys.

    Where a cache of keys is not a whole number of blocks, a block of queries lies in two blocks of positions.
    """
    place = shape.positions() // shape.block
    places = _rows(shape, place)
    first, last = matrix[:, places[:, 0]], matrix[:, places[:, -1]]
    several = matrix.shape[0] > 1
    return Region(
        first | last,
        first & last,
        lambda group, query, key: matrix[group if several else 0, place[query], key // shape.block],
    )


def everything(shape: Shape) -> Region:
    """Every pair."""
    zero = torch.zeros(shape.queries, dtype=torch.int64)
    return between(shape, zero, zero + shape.keys)


def mix(regions: Sequence[tuple[int, Region]]) -> Region:
    """For the first `count` heads one region, for the next another: [(count, region), ...], none of them mixed."""
    sizes = torch.tensor([len(region.touched) for _, region in regions])
    owner, start = torch.arange(len(regions)).repeat_interleave(sizes), sizes.cumsum(0) - sizes
    heads = [
        int(start[n]) + torch.arange(count) * (len(region.touched) > 1) for n, (count, region) in enumerate(regions)
    ]

    def allows(group: Tensor, query: Tensor, key: Tensor) -> Tensor:
        shape = (group + query + key).shape
        group, query, key = group.expand(shape), query.expand(shape), key.expand(shape)
        found = torch.zeros(group.shape, dtype=torch.bool)
        for number, (_, region) in enumerate(regions):
            mine = owner[group] == number
            found[mine] = region.allows(group[mine] - start[number], query[mine], key[mine])
        return found

    touched, full = (torch.cat([getattr(region, name) for _, region in regions]) for name in ("touched", "full"))
    return Region(touched, full, allows, torch.cat(heads))


def _rows(shape: Shape, values: Tensor) -> Tensor:
    """[queries] -> [query blocks, block]; what is missing in the last block is as its last query."""
    places = torch.arange(-(-shape.queries // shape.block) * shape.block).clamp(max=shape.queries - 1)
    return values[places].view(-1, shape.block) if shape.queries else values.new_zeros(0, shape.block)
