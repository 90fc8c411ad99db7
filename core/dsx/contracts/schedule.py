"""Role `schedule`: hyperparameters of a step. One filler."""

from __future__ import annotations

from collections.abc import Mapping

from dsx.contracts.data import Hyper


class Schedule:
    """The null part: constant."""

    def at(self, step: int, hypers: Mapping[str, Hyper]) -> Mapping[str, Hyper]:
        """Hyperparameters of update number `step` (from 1), by group.

        A pure function of the step: factors on each group's own base values, so groups keep their proportions and a
        resumed run needs no state.
        """
        return hypers
