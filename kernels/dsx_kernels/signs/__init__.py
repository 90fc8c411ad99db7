"""Signs of a slice, one scale for each block of it, and what they leave over: 1/31 of its bytes."""

from dsx_kernels.signs.ops import signs

__all__ = ["signs"]
