"""Stochastic gradient descent in one pass over flat slices."""

from dsx_kernels.sgd.ops import sgd

__all__ = ["sgd"]
