"""Plugin `delayed_update`: the optimizer runs beside the next step (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840,
section 5.2: one-step delayed parameter update)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Job, Layout, Part, Piece, Rule, Shard, Side, Stepper, Store, Walk, lasting
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Need, hook, non_negative, positive
from dsx.plugin import Part as Filler
from dsx_offload.staged import Staged


@frozen(kw_only=True)
class Options:
    """`[optimize.delayed_update]`.

    after    updates made in the ordinary way before the first delayed one: weights change fastest in the beginning
    threads  of the update, on CPUs; None: as many as torch uses for a step
    """

    after: Annotated[int, non_negative] = 40
    threads: Annotated[int, positive] | None = None


class Delayed(Stepper):
    """Takes the gradients of a step and updates in a thread of its own, while the next step computes its gradients from
    the weights as they were; those take the place of the old ones when that step's are final. That costs loss where the
    weights move fast (docs/how-to/offload.md).

    Holds, beside everything else, one gradient and one parameter of each shard.
    """

    def __init__(self, rule: Rule, layout: Layout, store: Store, options: Options, device: torch.device) -> None:
        self._rule, self._layout, self._store = rule, layout, store
        self._after, self._device = options.after, device
        self._side = Side.of(device)
        self._walk = Walk(rule, layout, store)
        self._gradients: dict[Shard, Tensor] = {}
        self._staged = Staged(self._walk, layout, store, device)
        self._threads = options.threads or torch.get_num_threads()
        self._worker: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._pending = False

    def start(self, job: Job) -> None:
        self._make_room()
        if job.number <= self._after:
            self._walk.sweep(self._call(job), self._layout.publish, partial=not all(job.used))
            self._layout.reset()
            return
        for shard in self._layout.shards:
            for part in self._walk.parts_of(shard):
                self._gradient(part).copy_(self._layout.gradient_of(shard, part.span))
            if "master" not in self._store.names(shard.key) or not all(job.used):
                self._layout.settle()  # what was published belongs to whatever brings it to the ranks until then
                self._staged.copy_live(shard)
        self._layout.reset()
        self._pending = True
        if self._device.type == "meta":  # on paper nothing runs beside anything
            self._update(job)
            return
        self._worker = self._worker or ThreadPoolExecutor(
            1, "dsx-update", initializer=lambda: torch.set_num_threads(self._threads)
        )
        self._side.follow()
        self._running = self._worker.submit(self._update, job)

    def settle(self) -> None:
        if not self._pending:
            return
        self._pending = False
        if (running := self._running) is not None:
            self._running = None
            running.result()
            self._side.join()
        for shard in self._layout.shards:
            self._staged.show(shard)
            self._layout.publish(shard)

    def drain(self) -> None:
        self.settle()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def bytes(self) -> Mapping[str, int]:
        gradients = sum(tensor.numel() * tensor.element_size() for tensor in self._gradients.values())
        return {"delayed grad": gradients, "delayed param": self._staged.bytes()}

    def _call(self, job: Job) -> Callable[[Piece, Mapping[str, Tensor]], Iterator[object] | None]:
        nothing = torch.zeros(0, len(job.used), dtype=torch.float64)
        return lambda piece, states: self._rule.update(piece, states, job, nothing)

    def _update(self, job: Job) -> None:
        with torch.no_grad(), self._side.within():
            self._walk.sweep(self._call(job), target=self._staged.part, gradient=self._gradient)

    def _gradient(self, part: Part) -> Tensor:
        return self._gradients[part.piece.shard][slice(*part.span)]

    def _make_room(self) -> None:
        """Buffers, once, when the gradients' dtypes can be seen."""
        for shard in self._layout.shards if not self._gradients else ():
            first = self._walk.parts_of(shard)[0]
            dtype = self._layout.gradient_of(shard, first.span).dtype
            self._gradients[shard] = lasting(shard.stop - shard.start, dtype, self._device)
            self._staged.of(shard)


def _notes(options: Options, steps: int | None) -> Iterator[str]:
    if steps is not None and steps <= options.after:
        yield f"'delayed_update' delays nothing: all {steps} updates of this run come before `after`, {options.after}"


descriptor = Descriptor(
    name="delayed_update",
    section="optimize",
    contract=1,
    options=Options,
    fills={"stepper": Fill(needs=[Need("rule.silent", "a thread beside the training must not communicate")])},
    summary="the optimizer runs beside the next step, one step behind",
    notes=_notes,
)


@hook
def dsx_optimize(options: Options) -> list[Filler]:
    return [Filler("stepper", lambda ctx: _build(options, ctx))]


def _build(options: Options, ctx: Context) -> Delayed:
    if ctx.rule.sums:
        raise DsxError(
            "'delayed_update' cannot run with this optimizer",
            where="[optimize] use",
            found="a rule that sums numbers over all ranks while it updates",
            remedy="remove 'delayed_update', or choose an elementwise optimizer",
        )
    return Delayed(ctx.rule, ctx.layout, ctx.store, options, ctx.plan.device)
