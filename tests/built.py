"""What the package was built with here."""

from __future__ import annotations

import pytest

from dsx_kernels import library

HAS_NATIVE = library.missing() is None

needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="no native library here")
