"""The test kit for plugin authors: a pool of ranks, plain PyTorch to compare with, and the conformance checks."""

from __future__ import annotations

from dsx.counting import Counting
from dsx.testing.conform import check_plugin, refuses
from dsx.testing.counting import CountingPlugin
from dsx.testing.plain import distance, largest, train_plain, weights_of
from dsx.testing.ranks import Ranks, RanksError

__all__ = [
    "Counting",
    "CountingPlugin",
    "Ranks",
    "RanksError",
    "check_plugin",
    "distance",
    "largest",
    "refuses",
    "train_plain",
    "weights_of",
]
