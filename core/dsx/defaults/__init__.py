"""Core's own first version of every part: together they are a complete trainer, the same as a plain PyTorch loop with
data parallelism. It is the reference that every other part is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsx.contracts import Dtypes, Groups, Guard, Scaler, Schedule, Tier, Transport
from dsx.defaults.adamw import AdamW
from dsx.defaults.collectives import Collectives
from dsx.defaults.inline import Inline
from dsx.defaults.replicated import Replicated
from dsx.plugin import Context


def _transport(ctx: Context) -> Transport:
    return Collectives(ctx.plan.device) if ctx.plan.world > 1 else Transport()


NULL_PARTS: Mapping[str, Callable[[Context], Any]] = {
    "dtypes": lambda ctx: Dtypes(),
    "groups": lambda ctx: Groups(),
    "rule": lambda ctx: AdamW(),
    "transport": _transport,
    "guard": lambda ctx: Guard(),
    "scaler": lambda ctx: Scaler(),
    "tiers": lambda ctx: Tier(),
    "layout": lambda ctx: Replicated(ctx),
    "stepper": lambda ctx: Inline(ctx.rule, ctx.layout, ctx.store),
    "schedule": lambda ctx: Schedule(),
}
"""By role. The chains wrappers, activations and observers and the claims of attention are simply empty."""
