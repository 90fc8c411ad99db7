"""The null stepper: updates shard after shard, on the engine's thread, as soon as it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsx.contracts import Job, Layout, Rule, Shard, Store
from dsx.contracts.data import Piece

Sweep = Callable[[Piece, Mapping[str, Tensor]], None]


class Inline:
    """One sweep over the shards, or two for a rule that needs sums over whole parameters first."""

    def __init__(self, rule: Rule, layout: Layout, store: Store) -> None:
        self._rule, self._layout, self._store = rule, layout, store

    def settle(self) -> None:
        """Nothing is ever left over."""

    def drain(self) -> None:
        """Nothing is ever left over."""

    def start(self, job: Job) -> None:
        rule, layout = self._rule, self._layout
        sums = torch.zeros(rule.sums, len(job.used), dtype=torch.float64)
        if rule.sums:
            self._sweep(lambda piece, states: rule.measure(piece, states, job, sums), lambda shard: None)
            sums = layout.total(sums)
        self._sweep(lambda piece, states: rule.update(piece, states, job, sums), layout.publish)
        layout.reset()

    def _sweep(self, call: Sweep, done: Callable[[Shard], None]) -> None:
        shards = self._layout.shards
        for shard, following in zip(shards, [*shards[1:], None], strict=True):
            if following is not None:
                self._store.prefetch(following.key, self._names(following))
            held, states = self._fetch(shard)
            call(shard.piece(), states)
            self._store.put(shard.key, held)
            done(shard)

    def _names(self, shard: Shard) -> list[str]:
        """States of a shard; its gradient is the layout's to lend, wherever it rests."""
        return [name for name in self._store.names(shard.key) if name != "grad"]

    def _fetch(self, shard: Shard) -> tuple[list[str], dict[str, Tensor]]:
        """Names borrowed from the store, and everything a rule sees of a shard.

        A separate master is read; then the parameter is only written, so it never has to be brought near.
        """
        target, names = self._layout.target(shard), self._names(shard)
        separate = "master" in names
        write = [name for name in names if name == "param" and separate]
        states = self._store.fetch(shard.key, [name for name in names if name not in write], write)
        if target is not None:
            states["param"] = target
        states.setdefault("master", states["param"])
        states["grad"] = self._layout.gradient_of(shard)
        return names, states
