"""Signs and scales of several ranks, as the mean of what they stand for."""

from dsx_kernels.signs_mean.ops import signs_mean

__all__ = ["signs_mean"]
