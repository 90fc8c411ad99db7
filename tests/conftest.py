"""The shipped test kit serves this suite too."""

from __future__ import annotations

import os

# As in the pool of ranks: 16-bit matrix products round differently with another number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

pytest_plugins = ["dsx.testing.fixtures"]
