"""Attention over lists of blocks of the score matrix, forward and backward."""

from dsx_kernels.block_attention.layout import BlockLayout
from dsx_kernels.block_attention.ops import block_attention
from dsx_kernels.block_attention.rules import BITS, CAUSAL, FULL, SEGMENTS, WINDOW

__all__ = ["BITS", "CAUSAL", "FULL", "SEGMENTS", "WINDOW", "BlockLayout", "block_attention"]
