"""A slice of an N-dimensional tensor, taken in memory order, as few rectangles as it needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from attrs import frozen


@frozen
class Box:
    """A rectangle of a tensor.

    offsets, sizes  in the tensor, by dimension
    begin           where it starts in the slice; it is contiguous there
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Rectangles that tile elements [start, stop) of a tensor of `shape`, in memory order: at most 2N - 1 of them.

    An empty slice of a tensor that has elements has no rectangle; a tensor without elements is one, of its own shape.
    """
    shape = tuple(shape)
    if math.prod(shape) == 0:
        return [Box((0,) * len(shape), shape, 0)]
    return [Box(offsets, sizes, at - start) for offsets, sizes, at in _cut(shape, start, stop)]


def _cut(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    if start >= stop:
        return
    if not shape:
        yield (), (), start
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _inside(shape, start // row, start, stop)
        return
    yield from _inside(shape, first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:]), first * row
    yield from _inside(shape, last, last * row, stop)


def _inside(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Rectangles of part of the row at `index` of the first dimension."""
    base = index * math.prod(shape[1:])
    for offsets, sizes, at in _cut(shape[1:], start - base, stop - base):
        yield (index, *offsets), (1, *sizes), at + base
