"""The manifest: a TOML file read into frozen classes, with every problem of it found at once."""

from __future__ import annotations

from dsx.manifest.batch import Batch
from dsx.manifest.convert import structure
from dsx.manifest.manifest import Manifest
from dsx.manifest.ranges import (
    Range,
    choice,
    distinct,
    fraction,
    non_empty,
    non_negative,
    positive,
    reference,
    unit_interval,
)
from dsx.manifest.read import Origin
from dsx.manifest.schema import Section, Target

__all__ = [
    "Batch",
    "Manifest",
    "Origin",
    "Range",
    "Section",
    "Target",
    "choice",
    "distinct",
    "fraction",
    "non_empty",
    "non_negative",
    "positive",
    "reference",
    "structure",
    "unit_interval",
]
