"""A mean of gradients over time, each element with a factor of its own."""

from dsx_kernels.momentum.ops import momentum

__all__ = ["momentum"]
