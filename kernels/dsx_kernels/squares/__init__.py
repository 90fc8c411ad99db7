"""Sum of squares of a tensor in one read."""

from dsx_kernels.squares.ops import squares

__all__ = ["squares"]
