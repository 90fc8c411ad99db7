"""The shipped test kit serves this suite too."""

from __future__ import annotations

pytest_plugins = ["dsx.testing.fixtures"]
