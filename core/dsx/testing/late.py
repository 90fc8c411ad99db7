"""The latest stepper that a layout allows: it updates a shard when that is wanted, and no sooner."""

from __future__ import annotations

from collections import deque

import torch

from dsx.contracts import Job, Layout, Rule, Shard, Stepper, Store, Walk, Watcher
from dsx.plugin import Context, Descriptor, Fill, Need, Part, hook


class Late(Stepper, Watcher):
    """With it a layout trains as without, if it wants whatever is used, before it is used."""

    def __init__(self, rule: Rule, layout: Layout, store: Store) -> None:
        self._rule, self._layout = rule, layout
        self._walk = Walk(rule, layout, store)
        self._left: deque[Shard] = deque()

    def start(self, job: Job) -> None:
        self.drain()
        self._job = job
        self._left.extend(self._layout.shards)

    def wanted(self, shard: Shard) -> None:
        while shard in self._left:
            self._update(self._left.popleft())

    def _update(self, shard: Shard) -> None:
        job = self._job
        nothing = torch.zeros(0, len(job.used), dtype=torch.float64)
        with torch.no_grad():
            self._walk.sweep(
                lambda piece, states: self._rule.update(piece, states, job, nothing),
                self._layout.publish,
                partial=not all(job.used),
                shards=[shard],
            )
        if not self._left:
            self._layout.reset()

    def drain(self) -> None:
        while self._left:
            self._update(self._left.popleft())

    def settle(self) -> None:
        """A layout wants everything before a backward."""
        return

    def final(self, shard: Shard) -> None:
        """There is time."""
        return

    def revoked(self, shard: Shard) -> None:
        """Nothing was begun."""
        return


class LatePlugin:
    """Carries it into a run."""

    descriptor = Descriptor(
        name="late",
        section="optimize",
        contract=1,
        fills={"stepper": Fill(needs=[Need("gradients.early", "it updates what is wanted")])},
        summary="updates a shard when it is wanted",
    )

    @hook
    def dsx_optimize(self) -> list[Part]:
        """Its stepper, which watches."""
        return [Part("stepper", _build)]


def _build(ctx: Context) -> Late:
    stepper = Late(ctx.rule, ctx.layout, ctx.store)
    ctx.layout.watch(stepper)
    return stepper
