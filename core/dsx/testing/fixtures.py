"""The test kit as a pytest plugin: `pytest_plugins = ["dsx.testing.fixtures"]` in a conftest.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dsx.testing.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """A pool of gloo ranks for the whole session; no process starts before the first test that uses it."""
    with Ranks() as pool:
        yield pool
