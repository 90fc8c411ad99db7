"""AdamW in one pass over flat slices."""

from dsx_kernels.adamw.ops import adamw

__all__ = ["adamw"]
