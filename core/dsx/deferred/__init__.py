"""Models that are built without memory, and given their values shard by shard."""

from __future__ import annotations
