"""The null stepper: updates shard after shard, on the engine's thread, as soon as it is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from dsx.contracts import Job, Layout, Piece, Rule, Stepper, Store, Walk


class Inline(Stepper):
    """One sweep over the shards, or two for a rule that needs sums over whole parameters first."""

    def __init__(self, rule: Rule, layout: Layout, store: Store) -> None:
        self._rule, self._layout = rule, layout
        self._walk = Walk(rule, layout, store)

    def settle(self) -> None:
        """Nothing is ever left over."""

    def drain(self) -> None:
        """Nothing is ever left over."""

    def voting(self) -> None:
        self._walk.prepare(self._layout.shards)

    def start(self, job: Job) -> None:
        rule, layout = self._rule, self._layout
        sums = torch.zeros(rule.sums, len(job.used), dtype=torch.float64)
        if rule.sums:
            self._walk.sweep(lambda piece, states: rule.measure(piece, states, job, sums), partial=True)
            sums = layout.total(sums)

        def update(piece: Piece, states: Mapping[str, Tensor]) -> Iterator[object] | None:
            return rule.update(piece, states, job, sums)

        if rule.scope(job.number) == "local":  # the rule brings every rank's parameters to their new values itself
            self._walk.sweep(
                update,
                target=lambda part: layout.local(part.piece.shard)[1],
                gradient=lambda part: layout.local(part.piece.shard)[0],
            )
        else:
            self._walk.sweep(update, layout.publish, partial=not all(job.used))
        layout.reset()
