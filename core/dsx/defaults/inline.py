"""The null stepper: updates shard after shard, on the engine's thread, as soon as it is asked."""

from __future__ import annotations

import torch

from dsx.contracts import Job, Layout, Rule, Stepper, Store, Walk


class Inline(Stepper):
    """One sweep over the shards, or two for a rule that needs sums over whole parameters first."""

    def __init__(self, rule: Rule, layout: Layout, store: Store) -> None:
        self._rule, self._layout = rule, layout
        self._walk = Walk(rule, layout, store)

    def settle(self) -> None:
        """Nothing is ever left over."""

    def drain(self) -> None:
        """Nothing is ever left over."""

    def start(self, job: Job) -> None:
        rule, layout = self._rule, self._layout
        sums = torch.zeros(rule.sums, len(job.used), dtype=torch.float64)
        if rule.sums:
            self._walk.sweep(lambda piece, states: rule.measure(piece, states, job, sums))
            sums = layout.total(sums)
        self._walk.sweep(lambda piece, states: rule.update(piece, states, job, sums), layout.publish)
        layout.reset()
