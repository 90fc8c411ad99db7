"""The test kit for plugin authors."""

from __future__ import annotations

from dsx.testing.ranks import Ranks, RanksError

__all__ = ["Ranks", "RanksError"]
