"""Puts the broken plugins of tests/fixtures/broken_plugins where dsx looks for installed packages."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

HOME = Path(__file__).parent / "fixtures" / "broken_plugins"

CASES = sorted(path.name for path in HOME.iterdir() if list(path.glob("*.dist-info")))
"""Folders that each look like one site-packages folder."""


def install(monkeypatch: pytest.MonkeyPatch, *cases: str) -> None:
    """Make distributions and modules of these folders importable until the test ends; modules are imported anew."""
    for case in cases:
        assert case in CASES, case
        monkeypatch.syspath_prepend(HOME / case)
        for module in (HOME / case).glob("*.py"):
            monkeypatch.delitem(sys.modules, module.stem, raising=False)
    importlib.invalidate_caches()
