"""Plugin `delayed_update`: the optimizer runs beside the next step (Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840,
section 5.2: one-step delayed parameter update)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated

import torch
from attrs import frozen
from torch import Tensor

from dsx.contracts import Job, Layout, Part, Piece, Rule, Shard, Side, Span, Stepper, Store, Walk, lasting
from dsx.errors import DsxError
from dsx.plugin import Context, Descriptor, Fill, Need, hook, non_negative, positive
from dsx.plugin import Part as Filler


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
        self._gradients: dict[str, Tensor] = {}
        self._parameters: dict[str, Tensor] = {}
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
            for start, stop in self._spans(shard):
                self._gradients[shard.key][start:stop].copy_(self._layout.gradient_of(shard, (start, stop)))
            if "master" not in self._store.names(shard.key) or not all(job.used):
                self._copy_parameter(shard)
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
            new, target = self._parameters[shard.key], self._layout.target(shard)
            if target is not None:
                target.copy_(new)
            else:
                for span in self._spans(shard):
                    self._store.fetch(shard.key, [], ["param"], span=span)["param"].copy_(new[slice(*span)])
                    self._store.put(shard.key, dirty=["param"])
            self._layout.publish(shard)

    def drain(self) -> None:
        self.settle()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def bytes(self) -> Mapping[str, int]:
        held = {"delayed grad": self._gradients, "delayed param": self._parameters}
        return {name: sum(t.numel() * t.element_size() for t in tensors.values()) for name, tensors in held.items()}

    def _call(self, job: Job) -> Callable[[Piece, Mapping[str, Tensor]], Iterator[object] | None]:
        nothing = torch.zeros(0, len(job.used), dtype=torch.float64)
        return lambda piece, states: self._rule.update(piece, states, job, nothing)

    def _update(self, job: Job) -> None:
        def part_of(tensors: Mapping[str, Tensor], part: Part) -> Tensor:
            return tensors[part.piece.shard.key][slice(*part.span)]

        with torch.no_grad(), self._side.within():
            self._walk.sweep(
                self._call(job),
                target=lambda part: part_of(self._parameters, part),
                gradient=lambda part: part_of(self._gradients, part),
            )

    def _make_room(self) -> None:
        """Buffers, once, when the gradients' dtypes can be seen."""
        for shard in self._layout.shards if not self._gradients else ():
            size = shard.stop - shard.start
            span = next(self._spans(shard))
            dtype = self._layout.gradient_of(shard, span).dtype
            self._gradients[shard.key] = lasting(size, dtype, self._device)
            self._parameters[shard.key] = lasting(size, shard.flat.dtype, self._device)

    def _copy_parameter(self, shard: Shard) -> None:
        """Take the parameter as it is now, which somebody may have edited: where it is itself what is updated, or not
        all of it is."""
        here, target = self._parameters[shard.key], self._layout.target(shard)
        if target is not None:
            self._layout.settle()  # what was published belongs to whatever brings it to the ranks until then
            here.copy_(target)
            return
        for start, stop in self._spans(shard):
            self._store.fetch(shard.key, ["param"], into=here[start:stop], span=(start, stop))

    def _spans(self, shard: Shard) -> Iterator[Span]:
        size = shard.stop - shard.start
        each = self._store.grain(shard.key) or max(size, 1)
        for start in range(0, max(size, 1), each):
            yield start, min(start + each, size)


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
