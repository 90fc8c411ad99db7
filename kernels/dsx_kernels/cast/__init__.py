"""Conversion between floating dtypes in one pass."""

from dsx_kernels.cast.ops import cast

__all__ = ["cast"]
