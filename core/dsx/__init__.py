"""dsx: a microkernel for training large PyTorch models.

engine = dsx.prepare(model, "run.toml")
for batch in batches:
    engine.backward(engine(batch))
    engine.step()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsx.contracts import Report
    from dsx.deferred.recording import empty_init
    from dsx.engine import Engine
    from dsx.errors import DsxError
    from dsx.heed import stopping
    from dsx.manifest import Manifest
    from dsx.plan.forecast import forecast
    from dsx.sites.attribute import attention
    from dsx.start import prepare
    from dsx.weights.archive import export

__version__ = "0.1.0"

__all__ = [
    "DsxError",
    "Engine",
    "Manifest",
    "Report",
    "attention",
    "empty_init",
    "export",
    "forecast",
    "prepare",
    "stopping",
]

_HOMES = {
    "DsxError": "dsx.errors",
    "Engine": "dsx.engine",
    "Manifest": "dsx.manifest",
    "Report": "dsx.contracts",
    "attention": "dsx.sites.attribute",
    "empty_init": "dsx.deferred.recording",
    "export": "dsx.weights.archive",
    "forecast": "dsx.plan.forecast",
    "prepare": "dsx.start",
    "stopping": "dsx.heed",
}


def __getattr__(name: str) -> Any:
    """Names are fetched when used, so that `dsx --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dsx' has no attribute '{name}'")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
