"""Role `activations`: what is kept for backward. A chain, outermost first in manifest order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsx.contracts.data import Unit

Forward = Callable[..., Any]


class Activations:
    """The null part: everything is kept."""

    def wrap(self, unit: Unit, forward: Forward) -> Forward:
        """The forward to call instead of a unit's own.

        It sees live parameters, and must call the same forward in recomputation with the same random state.
        """
        return forward
