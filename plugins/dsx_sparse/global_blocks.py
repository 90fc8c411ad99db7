"""Plugin `global_blocks`: chosen blocks that every query sees, and that see every key if wished.

DeepSpeed's global_block_indices, global_block_end_indices and horizontal_global_attention. Alone it leaves most queries
with little; `mixed` unites it with others.
"""

from __future__ import annotations

from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.plugin import Part, hook, non_negative
from dsx_sparse.pattern import Pattern, misfit
from dsx_sparse.plugin import describe, part
from dsx_sparse.region import Region, Shape, blocks


@frozen(kw_only=True)
class Options(Pattern):
    """`[attention.global_blocks]`.

    modules     patterns of the names of attention sites that it claims
    block       tokens of a block: 16, 32, 64 or 128
    starts      blocks that are global; those beyond the last block are ignored
    ends        where each range that begins in `starts` ends, itself outside; none: after one block
    horizontal  whether the queries in global blocks see every key, too
    """

    starts: tuple[Annotated[int, non_negative], ...] = (0,)
    ends: tuple[Annotated[int, non_negative], ...] = ()
    horizontal: bool = False

    def check(self) -> None:
        check_ranges("global_blocks", self.starts, self.ends)

    def region(self, shape: Shape) -> Region:
        return blocks(shape, cross(chosen(shape.columns, self.starts, self.ends), self.horizontal))


def check_ranges(name: str, starts: tuple[int, ...], ends: tuple[int, ...]) -> None:
    """Refuse ends that do not go with the starts."""
    if ends and len(ends) != len(starts):
        raise misfit(name, "ends", list(ends), f"one for each of the {len(starts)} starts, or none")
    for start, end in zip(starts, ends, strict=False):
        if end <= start:
            raise misfit(name, "ends", list(ends), f"an end above its start {start}")


def chosen(count: int, starts: tuple[int, ...], ends: tuple[int, ...]) -> Tensor:
    """Which of `count` lie in the ranges: bool [count]."""
    found = torch.zeros(count, dtype=torch.bool)
    for start, end in zip(starts, ends or tuple(start + 1 for start in starts), strict=True):
        found[start:end] = True
    return found


def cross(chosen: Tensor, horizontal: bool) -> Tensor:
    """The columns of the chosen, and their rows if wished: bool [1, n, n]."""
    count = len(chosen)
    columns = chosen.expand(count, count)
    return (columns | chosen[:, None] if horizontal else columns)[None]


descriptor = describe("global_blocks", Options, "chosen blocks that every query sees")


@hook
def dsx_attention(options: Options) -> list[Part]:
    return part("global_blocks", options)
