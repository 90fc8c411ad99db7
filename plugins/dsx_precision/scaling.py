"""What the loss scales share: the capability, the scaling, and the search for what overflowed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from dsx.contracts import Layout, Scaler, Segment, Transport, Unit, at_least_fp32
from dsx.errors import Halted
from dsx.plugin import Context, Range

SCALED = "loss.scaled"
"""Offered by every loss scale."""

above_one = Range("above 1", lambda value: bool(value > 1))


def why(name: str) -> str:
    """Why float16 needs a loss scale, and how to get one."""
    return (
        "gradients below 6e-8 are zero in float16; put 'dynamic_loss_scale' beside "
        f"'{name}' in precision.use, or 'static_loss_scale' with scale = 1.0 for none"
    )


class LossScale(Scaler):
    """A scale that can name what overflowed."""

    def __init__(self, value: float) -> None:
        self.value = value
        self._overflowed: Callable[[], Sequence[tuple[Unit, Segment]]] = tuple

    def bind(self, ctx: Context) -> None:
        """Who holds the gradients, and reaches the other ranks."""
        self._overflowed = partial(overflowed, ctx.layout, ctx.transport)

    def scale(self, loss: Tensor) -> Tensor:
        return loss.to(at_least_fp32(loss.dtype)) * self.value

    def halt(self, what: str, remedy: str) -> Halted:
        """The error that ends training, with the parameters whose gradients are not finite; called by all ranks."""
        found = self._overflowed()
        if not found:
            return Halted(what, found="every gradient is finite, and their squared norm is not", remedy=remedy)
        unit, segment = found[0]
        others = f", and {len(found) - 1} more after it" if len(found) > 1 else ""
        return Halted(
            what,
            where=f"the unit '{unit.name or 'root'}', the parameter '{segment.name}'{others}",
            found="Inf or NaN in the gradient, summed over all ranks and micro-batches",
            remedy=remedy,
        )


def overflowed(layout: Layout, transport: Transport) -> Sequence[tuple[Unit, Segment]]:
    """Trainable parameters whose final gradient has an element that is not finite, in the model's order.

    Entered by all ranks before the layout's `reset`; every rank looks at the gradients that it holds, and all get the
    same answer. The root unit comes first.
    """
    places = [
        (unit, segment) for unit in layout.units for flat in unit.flats if flat.trainable for segment in flat.segments
    ]
    numbers = {segment.index: number for number, (_, segment) in enumerate(places)}
    bad = [0.0] * len(places)
    device = torch.device("cpu")
    for shard in layout.shards:
        gradient = layout.gradient_of(shard)
        device = gradient.device
        for _, segment in shard.piece().places():
            low, high = max(segment.start, shard.start), min(segment.stop, shard.stop)
            part = gradient[low - shard.start : high - shard.start]
            bad[numbers[segment.index]] = float(not part.isfinite().all())
    counts = torch.tensor(bad, dtype=torch.float64, device=device)
    transport.all_reduce(counts, "sum", channel="admin", purpose="admin").wait()
    return [place for place, count in zip(places, counts.tolist(), strict=True) if count]
