"""What LAMB with a frozen variance looks at: norms and the variance of what arrives, in one pass."""

from dsx_kernels.lamb.ops import lamb

__all__ = ["lamb"]
