"""Role `scaler`: scales the loss so that small gradients survive 16 bits. One filler; called by the engine only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class Scaler:
    """The null part: scale 1."""

    value: float = 1.0
    """The present scale; changes only in `update`."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to run backward from: `loss` times `value`, in at least fp32."""
        return loss

    def update(self, finite: bool) -> None:
        """Adapt `value` after a window whose gradients were finite or not; the same call on all ranks.

        Where they were not, the layout still holds them. Raises `Halted` where skipping leads nowhere.
        """

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`."""
