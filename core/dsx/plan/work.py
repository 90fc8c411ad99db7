"""What one update of one rank does."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen
class Work:
    """What one update of one rank does.

    flops     of matrix products and convolutions, by dtype name ("float32", "bfloat16", "float16", "float64"); those of
              attention, which is slower, as "float32 attention" and so on
    moved     bytes read and written by all other operations of forward and backward
    updated   bytes read and written by the optimizer's update
    calls     operations called
    sent      bytes that leave the rank, by purpose ("gather", "publish", "reduce", ...)
    messages  collectives called, by purpose
    """

    flops: Mapping[str, int]
    moved: int
    updated: int
    calls: int
    sent: Mapping[str, int]
    messages: Mapping[str, int]
