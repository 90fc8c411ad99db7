"""A small pattern of each kind, for tests of what computes them."""

from __future__ import annotations

from dsx_sparse import (
    bigbird,
    dense,
    dilated,
    fixed,
    global_blocks,
    global_local,
    local_blocks,
    mixed,
    sliding_window,
    streaming,
    strided,
    variable,
)
from dsx_sparse.pattern import Pattern

WINDOW = sliding_window.Options(window=40, block=16)
PATTERNS: dict[str, Pattern] = {
    "dense": dense.Options(block=32),
    "sliding_window": WINDOW,
    "local_blocks": local_blocks.Options(block=16),
    "global_blocks": global_blocks.Options(block=16, horizontal=True),
    "strided": strided.Options(block=16, stride=3),
    "dilated": dilated.Options(block=16),
    "global_local": global_local.Options(block=16, window=20, starts=(5,)),
    "fixed": fixed.Options(block=16, local=2, patterns=2),
    "variable": variable.Options(block=16, local=(1, 3), random=1),
    "bigbird": bigbird.Options(block=16),
    "streaming": streaming.Options(sinks=3, recent=20, block=16),
    "mixed": mixed.Options(block=16, groups=(mixed.Group(heads=1, use=("strided", "streaming")), mixed.Group())),
}
"""All but `document`, which has no mask without segment ids."""
