"""What the stages share: every rank updates its 1/N of each flat parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from dsx.contracts import Ballot, Flat, Layout, Scope, Shard, Span, State, Unit, Watcher, logical_state
from dsx.plugin import Context
from dsx_zero.gradients import Gradients

MakeGradients = Callable[[Context, Sequence[Shard]], Gradients]


class Sharded(Layout):
    """Optimizer states of 1/N; where the parameters are is a subclass's business, the gradients are `gradients`'."""

    def __init__(self, ctx: Context, units: Sequence[Unit], gradients: MakeGradients) -> None:
        self._transport, self._store = ctx.transport, ctx.store
        self._rank, self._world, self._device = ctx.plan.rank, ctx.plan.world, ctx.plan.device
        self._states = {state.name: state for state in ctx.rule.states}
        self._block = ctx.rule.block
        self.units = units
        flats = [flat for unit in self.units for flat in unit.flats if flat.trainable]
        parts = [flat.part(self._rank, self._world) for flat in flats]
        self.shards = [Shard(flat, *part, part) for flat, part in zip(flats, parts, strict=True)]
        self.gradients = gradients(ctx, self.shards)

    def gradient(self, key: str, number: int, parameter: nn.Parameter) -> None:
        self.gradients.arrived(key, number, parameter)

    def begin_backward(self, boundary: bool, scope: Scope, sync: bool = True) -> None:
        self.want()
        self.gradients.begin(boundary, scope, sync)

    def end_backward(self) -> None:
        self.gradients.end()

    def watch(self, watcher: Watcher) -> None:
        super().watch(watcher)
        self.gradients.watcher = watcher

    def finish(self) -> Ballot:
        return self.gradients.finish()

    def agreed(self, used: Sequence[bool], words: Sequence[float]) -> bool:
        return self.gradients.agreed(used, words)

    def gradient_of(self, shard: Shard, span: Span | None = None) -> Tensor:
        return self.gradients.of(shard, span)

    def reset(self) -> None:
        self.gradients.reset()

    def total(self, vector: Tensor) -> Tensor:
        self._transport.all_reduce(vector, "sum", channel="rule", purpose="rule").wait()
        return vector

    def logical(self, name: str) -> Iterator[tuple[str, Tensor]]:
        for unit in self.units:
            for flat in unit.flats:
                held = self._store.names(flat.key)
                stored = next((n for n in ("master", "param") if n in held), "") if name == "weight" else name
                if stored in held:
                    yield from self._whole_state(flat, stored)
                elif name == "weight":
                    for segment, parameter in zip(flat.segments, flat.parameters, strict=True):
                        yield segment.name, parameter.detach()

    def _whole_state(self, flat: Flat, name: str) -> Iterator[tuple[str, Tensor]]:
        """A state gathered from all ranks: in one exchange for each flat parameter."""
        state, held = self._states.get(name, State(name)), self._store.fetch(flat.key, [name])[name]
        parted = state.scope != "rank"
        yield from logical_state(flat, state, held, self._transport, block=self._block, parted=parted)
        self._store.put(flat.key, clean=[name])
