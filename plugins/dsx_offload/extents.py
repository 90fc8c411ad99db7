"""Where states lie in files."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from dsx.contracts import Kind, Span
from dsx_kernels.aio import BLOCK, Files


def blocks(size: int) -> int:
    """`size` bytes rounded up to what is read and written at once."""
    return -(-size // BLOCK) * BLOCK


@frozen(eq=False)
class Extent:
    """A state's place.

    files   that hold it; None on paper
    offset  of its first byte there
    """

    files: Files | None
    offset: int
    kind: Kind

    def region(self, span: Span | None) -> Region:
        """The blocks of a part of it."""
        start, stop = span or (0, self.kind.size)
        width = self.kind.dtype.itemsize
        low = start * width // BLOCK * BLOCK
        return Region(self, start, stop, low, max(low, blocks(stop * width)))


@frozen(eq=False)
class Region:
    """Elements [start, stop) of a state, and the blocks [low, high), in bytes of it, in which they lie."""

    extent: Extent
    start: int
    stop: int
    low: int
    high: int

    @property
    def size(self) -> int:
        """Bytes of the blocks."""
        return self.high - self.low

    @property
    def ragged(self) -> bool:
        """Whether the blocks hold other elements of the state besides."""
        width, end = self.extent.kind.dtype.itemsize, self.extent.kind.size
        return self.low < self.start * width or (self.stop < end and self.stop * width < self.high)

    def within(self, other: Extent) -> Region:
        """The same part of another extent; none that shares a block with other parts, which on paper it may."""
        if self.ragged and other.files is not None:
            raise ValueError("a second value is written by whole blocks")
        return Region(other, self.start, self.stop, self.low, self.high)

    def overlaps(self, other: Region) -> bool:
        """Whether they share a block."""
        return self.extent is other.extent and self.low < other.high and other.low < self.high

    def view(self, buffer: Tensor) -> Tensor:
        """The elements, in a buffer that holds the blocks."""
        width = self.extent.kind.dtype.itemsize
        begin = self.start * width - self.low
        return buffer[begin : begin + (self.stop - self.start) * width].view(self.extent.kind.dtype)
