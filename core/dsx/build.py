"""Builds the parts of a resolved run in the stated order, and hands them the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dsx.agree import agree, alike, describe
from dsx.boundaries import Connection, disconnect, install
from dsx.compiled import refuse_compiled
from dsx.contracts import Attend, Attention, Flat, Observer, Shard, Site, State, Transport, Unit, with_values
from dsx.contracts.memory import trim
from dsx.defaults import NULL_PARTS
from dsx.deferred.values import Values
from dsx.errors import DsxError, SlotConflict
from dsx.hooks import Hooks
from dsx.plugin import Context, Part, Plan
from dsx.program import Program
from dsx.resolve import Resolved
from dsx.roles import BUILD_ORDER
from dsx.sites import find_sites
from dsx.store import Router
from dsx.together import together
from dsx.units import flatten, plain, trainable
from dsx.watch import Watch

Named = tuple[str, Part]


def build(
    resolved: Resolved,
    plan: Plan,
    model: nn.Module,
    transport: Transport | None = None,
    values: Values | None = None,
    sizes: Sequence[int] = (),
) -> Program:
    """Ask the hooks for parts, build them, and give them the model's parameters.

    transport  in place of the run's own, under its wrappers
    values     None: those that the model has
    sizes      footprints of the tiers, in order, if they are known: the space for them is taken first

    Afterwards the parameters are views of buffers that the layout owns, and every state exists.
    """
    ctx = Context(plan, plain(model), lambda **choices: _flatten(ctx, **choices))
    values = values or Values()
    parts = _parts(resolved, plan)
    built: list[tuple[Part, Any]] = []

    def make(role: str) -> list[tuple[str, Any]]:
        made = [(name, part, part.build(ctx)) for name, part in parts.get(role, ())]
        built.extend((part, result) for _, part, result in made)
        return [(name, result) for name, _, result in made]

    for role in BUILD_ORDER:
        if role.name == "transport" and transport is not None:
            ctx.parts["transport"] = transport
        else:
            _BUILDERS.get(role.name, _one)(ctx, role.name, make)
        if role.name == "transport":
            agree(ctx.transport, with_values(plan.device), _texts(resolved, model, values))
    refuse_compiled(model, ctx.layout)
    if sizes:
        router: Router = ctx.parts["tiers"]
        together(ctx.transport, with_values(plan.device), lambda: router.reserve(sizes), DsxError)
    _adopt(ctx, values)
    connection = install(ctx.layout, ctx.parts["activations"], ctx.parts["attention"], resolved.manifest.run.compile)
    ctx.parts["tiers"].refuse_idle_claims()
    for part, result in built:
        if part.bind is not None:
            part.bind(result, ctx)
    return _program(ctx, resolved, connection)


def _parts(resolved: Resolved, plan: Plan) -> Mapping[str, list[Named]]:
    hooks = Hooks(plugin for plugin, _ in resolved.plugins)
    parts: dict[str, list[Named]] = {}
    for plugin, options in resolved.plugins:
        for part in hooks.parts(plugin, options, plan):
            parts.setdefault(part.role, []).append((plugin.name, part))
    return parts


Make = Callable[[str], list[tuple[str, Any]]]


def _one(ctx: Context, role: str, make: Make) -> None:
    made = make(role)
    ctx.parts[role] = made[0][1] if made else NULL_PARTS[role](ctx)


def _many(ctx: Context, role: str, make: Make) -> None:
    ctx.parts[role] = [result for _, result in make(role)]


def _wrappers(ctx: Context, role: str, make: Make) -> None:
    """The first in the manifest ends up outermost."""
    for _, wrap in reversed(make(role)):
        ctx.parts["transport"] = wrap(ctx.transport)


def _tiers(ctx: Context, role: str, make: Make) -> None:
    ctx.parts[role] = Router(make(role), NULL_PARTS[role](ctx))


def _attention(ctx: Context, role: str, make: Make) -> None:
    """Pairs of a site and what was bound for it; they are placed when the model is connected."""
    claimants: Sequence[tuple[str, Attention]] = make(role)
    placed: list[tuple[Site, Attend]] = []
    ctx.parts[role] = placed
    if not claimants:
        return
    disconnect(ctx.model.parameters())  # an engine that had this model before may have changed its sites
    sites = find_sites(ctx.model)
    claims = {site.name: [(name, part) for name, part in claimants if part.claim(site)] for site in sites}
    for site in sites:
        claiming = claims[site.name]
        if len(claiming) > 1:
            raise SlotConflict(
                f"{' and '.join(repr(name) for name, _ in claiming)} both claim the attention of '{site.name}'",
                where="[attention]",
                remedy="let their patterns match different modules",
            )
        placed.extend((site, part.bind(site)) for _, part in claiming)
    for name, part in claimants:
        if not any(part is claimer for claiming in claims.values() for _, claimer in claiming):
            raise DsxError(
                f"'{name}' claims none of the model's attention sites",
                where=f"[attention.{name}]",
                found=f"sites: {', '.join(f'{site.name} ({site.kind})' for site in sites) or 'none'}",
                remedy="change its pattern; how a module becomes a site: docs/how-to/attention.md",
            )


_BUILDERS: Mapping[str, Callable[[Context, str, Make], None]] = {
    "wrappers": _wrappers,
    "tiers": _tiers,
    "activations": _many,
    "attention": _attention,
    "observers": _many,
}


def _flatten(ctx: Context, **choices: Any) -> Sequence[Unit]:
    return flatten(
        ctx.model, dtypes=ctx.dtypes, groups=ctx.groups, world=ctx.plan.world, block=ctx.rule.block, **choices
    )


def _texts(resolved: Resolved, model: nn.Module, values: Values) -> Mapping[str, str]:
    plugins = sorted((p.name, p.registration.target, p.registration.distribution) for p, _ in resolved.plugins)
    return {
        "manifest": resolved.manifest.digest(),
        "plugins": repr(plugins),
        "model": describe(plain(model)),
        "source of weights": values.text,
    }


def _adopt(ctx: Context, values: Values) -> None:
    """Rank 0's weights become everyone's, one flat parameter whole at a time; then each rank makes its states."""
    shards = {shard.flat: shard for shard in ctx.layout.shards}
    with torch.no_grad():
        for unit in ctx.layout.units:
            for flat in unit.flats:
                exact = torch.zeros(flat.size, dtype=flat.source, device=ctx.plan.device)
                if not (values.fill(flat, exact) and alike(ctx.transport, exact)):
                    ctx.transport.broadcast(exact, channel="admin", purpose="state").wait()
                ctx.layout.adopt(flat, exact)
                if flat.trainable:
                    _create_states(ctx, flat, shards[flat], exact)
        values.finish()
        trim()
        for buffer in ctx.model.buffers():
            if buffer.numel():
                ctx.transport.broadcast(buffer, channel="admin", purpose="state").wait()


def _create_states(ctx: Context, flat: Flat, shard: Shard, exact: torch.Tensor) -> None:
    """The master weights are made from the exact ones: made from rounded ones, bf16 training is off by 7e-3 in 6
    steps."""
    master = ctx.dtypes.master(flat.dtype, flat.source)
    lossy = "publish" in ctx.transport.lossy and ctx.layout.target(shard) is not None
    if master != flat.dtype or lossy or ctx.rule.apart:
        ctx.store.create(flat.key, "master", exact[shard.start : shard.stop].to(master, copy=True))
    for state in ctx.rule.states:
        size, dtype = _size(ctx, state, flat, shard), state.dtype or master
        ctx.store.create(flat.key, state.name, torch.zeros(size, dtype=dtype, device=ctx.plan.device))


def _size(ctx: Context, state: State, flat: Flat, shard: Shard) -> int:
    elements = {
        "shard": shard.stop - shard.start,
        "chunk": flat.size // ctx.plan.world,
        "rank": flat.size,
    }[state.scope]
    return {"element": elements, "segment": len(flat.segments), "block": elements // ctx.rule.block}[state.shape]


def _program(ctx: Context, resolved: Resolved, connection: Connection) -> Program:
    base = ctx.rule.hyper
    if (limit := resolved.manifest.optimize.clip_value) is not None:
        base = base.replace(clip_value=limit)
    observers: list[Observer] = ctx.parts["observers"]
    return Program(
        dtypes=ctx.dtypes,
        rule=ctx.rule,
        transport=ctx.transport,
        guard=ctx.guard,
        scaler=ctx.scaler,
        store=ctx.parts["tiers"],
        layout=ctx.layout,
        stepper=ctx.stepper,
        schedule=ctx.schedule,
        observers=tuple(observers),
        hypers=ctx.groups.hypers(base),
        parameters=tuple(trainable(ctx.model)),
        connection=connection,
        watch=Watch(ctx.model, ctx.layout, ctx.parts["tiers"]),
    )
