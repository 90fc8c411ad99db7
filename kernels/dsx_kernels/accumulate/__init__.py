"""Adding a scaled slice of any floating dtype to another, in one pass."""

from dsx_kernels.accumulate.ops import accumulate

__all__ = ["accumulate"]
