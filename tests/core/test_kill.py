"""SIGKILL at random instants, then --resume: the loss curve is the uninterrupted one's, bit for bit.

One run twice here, with states in files; tests/faults/kill.py does it to as many as wanted, every other one of them
with all states in memory.
"""

from __future__ import annotations

import sys

import pytest

from built import needs_native
from faults.kill import check


@pytest.mark.skipif(sys.platform != "linux", reason="looks for ranks in /proc")
@needs_native
def test_killed_runs_go_on_as_if_nothing_had_been_cases_78_99() -> None:
    assert len(check(times=2, nproc=2, seed=7, each=2)) == 2
