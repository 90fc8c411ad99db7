"""The conformance kit: does a plugin keep its contract?

    from dsx.testing import check_plugin

    def test_halving(ranks):
        check_plugin("halving", {"every": 2}, ranks=ranks)

It loads the plugin as a run would, trains a model of odd shapes with it, and checks what the contracts of its roles
say. What is broken is an AssertionError in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dsx.engine import Engine
from dsx.errors import DsxError
from dsx.hooks import Hooks
from dsx.registry import Plugin, Registry
from dsx.start import prepare
from dsx.testing.late import LatePlugin
from dsx.testing.models import Attentive, Noisy, Slopes, Tangle, tokens
from dsx.testing.plain import distance, largest, weights_of
from dsx.testing.ranks import Ranks
from dsx.testing.roles import ROLE_CHECKS, check_early_gradients, check_groups, check_transport

Tables = Mapping[str, Mapping[str, Any]]
STEPS, ACCUMULATION = 5, 2


def check_plugin(
    name: str,
    options: Mapping[str, Any] | None = None,
    *,
    beside: Tables | None = None,
    ranks: Ranks | None = None,
    tolerance: float | None = None,
    plugins: Mapping[str, Any] | None = None,
) -> None:
    """Check a plugin against the contracts of the roles it fills.

    name       as in a manifest
    options    its table; {} and None are its defaults
    beside     what else the manifest has, for a plugin that needs others
    ranks      the pool of the fixture `ranks`: adds two-rank runs; without it, one rank only
    tolerance  how far two ranks may be from one rank with the same samples; None: 1e-9 where parameters stay in fp64,
               2e-2 where they do not. And how far a run whose activations are not kept may be from one that keeps them;
               None: not at all
    plugins    carriers of plugins that no package registers, as for `dsx.prepare`

    Raises AssertionError, or the `DsxError` that a run would end with.
    """
    plugin = Registry.scan(plugins).load(name)
    Hooks([plugin])
    _check_descriptor(plugin)
    tables = _tables(plugin, options or {}, beside or {})
    make = Attentive if plugin.descriptor.section == "attention" else Tangle
    roles = plugin.descriptor.filled(_options(plugin))
    if "groups" in roles:
        check_groups(prepare(make().double(), tables, plugins=plugins))
    first, losses, start = _train(make, tables, plugins)
    _say(all(math.isfinite(loss) for loss in losses), f"'{name}' makes the loss {losses}")
    second, again, _ = _train(make, tables, plugins)
    _say(losses == again, f"'{name}' is not deterministic: two runs gave {losses} and {again}")
    _say(
        distance(_weights(second), _weights(first)) == 0,
        f"'{name}' is not deterministic: two runs end in other weights",
    )
    _check_untouched(name, first, start)
    _check_skip(name, first)
    for role in roles:
        if role in ROLE_CHECKS:
            ROLE_CHECKS[role](first)
        if "gradients.early" in roles[role].offers:
            check_early_gradients(first, lambda: first(*tokens(0, 0, 0)))
            _check_wanted(make, tables, plugins, losses)
    if "stepper" in roles:
        _check_updates(name, tables, _without(plugin, tables), plugins)
    if "activations" in roles:
        _check_recomputation(name, tables, _without(plugin, tables), plugins, tolerance or 0.0)
    if ranks is None:
        return
    _check_ranks(name, make, tables, plugins, ranks, tolerance)
    if {"transport", "wrappers"} & set(roles):
        ranks.run(_transport_on_rank, make, tables, plugins, world=3)


def _say(holds: bool, words: str) -> None:
    if not holds:
        raise AssertionError(words)


def _check_wanted(
    make: Callable[[], nn.Module], tables: Tables, plugins: Mapping[str, Any] | None, losses: Sequence[float]
) -> None:
    """An update may be as late as the layout wants it."""
    optimize = tables.get("optimize", {})
    late = {"optimize": {**optimize, "use": [*optimize.get("use", ()), "late"]}}
    run = {"run": {**tables["run"], "overlap_publish": True}}
    engine, found, _ = _train(make, {**tables, **late, **run}, {**(plugins or {}), "late": LatePlugin()})
    engine.close()
    _say(found == losses, f"a parameter is used before its shard is wanted: losses are {found}, and not {losses}")


def _without(plugin: Plugin, tables: Tables) -> Tables:
    section = plugin.descriptor.section
    table = {key: value for key, value in tables[section].items() if key != plugin.name}
    table["use"] = [used for used in table["use"] if used != plugin.name]
    return {**tables, section: table}


def _check_updates(name: str, tables: Tables, without: Tables, plugins: Mapping[str, Any] | None) -> None:
    """No update is lost, made twice or out of turn, whenever it is made, and whenever somebody looks."""
    plain = _slopes(name, without, plugins, overlap=False, looks=False)
    for overlap in (False, True):
        for looks in (False, True):
            off = distance(_slopes(name, tables, plugins, overlap, looks), plain)
            when = f"{', publishing overlapped' * overlap}{', weights read after every step' * looks}"
            _say(
                off == 0,
                f"with '{name}' updates are lost, made twice or out of turn: where gradients do not depend on weights, "
                f"weights are off by {off:.1e} after {STEPS + 1} updates and a skipped one{when}",
            )


def _slopes(
    name: str, tables: Tables, plugins: Mapping[str, Any] | None, overlap: bool, looks: bool
) -> dict[str, Tensor]:
    """Weights after some updates, a skipped one and another."""
    run = {**tables["run"], "overlap_publish": overlap}
    engine = prepare(Slopes().double(), {**tables, "run": run}, plugins=plugins)
    for step in range(STEPS):
        _steps(engine, [step], lambda step, micro: [tokens(step, micro, 0)])
        if looks:
            _weights(engine)
    _check_skip(name, engine)
    _steps(engine, [STEPS], lambda step, micro: [tokens(step, micro, 0)])
    weights = _weights(engine)
    engine.close()
    return weights


def _check_recomputation(
    name: str, tables: Tables, without: Tables, plugins: Mapping[str, Any] | None, tolerance: float
) -> None:
    """What is not kept is computed again, with the same random numbers."""
    found = []
    for each in (without, tables):
        torch.manual_seed(3)
        model = Noisy().double()
        engine = prepare(model, each, plugins=plugins)
        torch.manual_seed(4)
        losses = _steps(engine, range(STEPS), lambda step, micro: [tokens(step, micro, 0)])
        found.append((losses, _weights(engine)))
        engine.close()
    (plain, kept), (losses, weights) = found
    _say(losses[0] == plain[0], f"with '{name}' the first loss is {losses[0]}, and not {plain[0]}")
    off = max(distance(weights, kept), largest(losses, plain))
    _say(off <= tolerance, f"with '{name}' a model with dropout is off by {off:.1e} after {STEPS} updates")


def _check_descriptor(plugin: Plugin) -> None:
    options = plugin.descriptor.options
    _say(options is None or attrs.has(options), f"the options of '{plugin.name}' are no attrs class")
    if options is not None:
        frozen = "_frozen" in options.__setattr__.__name__
        _say(frozen, f"the options class of '{plugin.name}' is not frozen: use attrs.frozen")
    _say(bool(plugin.descriptor.summary), f"'{plugin.name}' has no summary for `dsx plugins check`")


def _tables(plugin: Plugin, options: Mapping[str, Any], beside: Tables) -> dict[str, Any]:
    tables: dict[str, Any] = {section: dict(table) for section, table in beside.items()}
    table = tables.setdefault(plugin.descriptor.section, {})
    table["use"] = [*table.get("use", ()), plugin.name]
    if options:
        table[plugin.name] = dict(options)
    tables["batch"] = {"accumulation": ACCUMULATION}
    tables["run"] = {"steps": STEPS, **tables.get("run", {})}
    return tables


def _options(plugin: Plugin) -> Any:
    """Fills may depend on options; the kit needs their roles only."""
    fills = plugin.descriptor.fills
    return None if not callable(fills) or plugin.descriptor.options is None else plugin.descriptor.options()


def _train(
    make: Callable[[], nn.Module], tables: Tables, plugins: Mapping[str, Any] | None
) -> tuple[Engine, list[float], dict[str, Tensor]]:
    model = make().double()
    start = weights_of(model)
    engine = prepare(model, tables, plugins=plugins)
    return engine, _steps(engine, range(STEPS), lambda step, micro: [tokens(step, micro, 0)]), start


def _steps(
    engine: Engine, steps: Sequence[int], data: Callable[[int, int], list[tuple[Tensor, Tensor]]]
) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(engine.accumulation):
            parts = data(step, micro)
            inputs, targets = (torch.cat([part[i] for part in parts]) for i in range(2))
            engine.backward(engine(inputs, targets))
            report = engine.step()
        losses.append(report.loss if report.loss is not None else math.nan)
    return losses


def _weights(engine: Engine) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.weights()}


def _check_untouched(name: str, engine: Engine, start: Mapping[str, Tensor]) -> None:
    after = _weights(engine)
    moved = [key for key, tensor in start.items() if distance({key: after[key]}, {key: tensor}) > 1e-2 * _eps(engine)]
    still = {key for key in start if "frozen" in key or "never" in key or "empty" in key}
    wrong = sorted(still & set(moved))
    _say(not wrong, f"'{name}' changes parameters that are frozen or have no gradient: {', '.join(wrong)}")
    report = engine.program.schedule.at(1, engine.program.hypers)
    if any(hyper.get("lr") for hyper in report.values()):
        _say(bool(moved), f"with '{name}' no parameter moves in {STEPS} steps")


def _eps(engine: Engine) -> float:
    """How much a weight may differ from its start by rounding alone: masters may be kept in fewer bits than fp64."""
    widest = max(torch.finfo(tensor.dtype).eps for _, tensor in engine.weights())
    return 1e-6 if widest < 1e-10 else 1.0


def _check_skip(name: str, engine: Engine) -> None:
    """A gradient that is not finite changes nothing but the scaler and the count of skips."""
    before, steps, skips = _weights(engine), engine.steps, engine.skips
    for _ in range(engine.accumulation):
        engine.backward(engine(*tokens(0, 0, 0)) * math.nan)
        report = engine.step()
    _say(report.skipped and not report.stepped, f"with '{name}' a NaN gradient does not skip the step")
    _say((engine.steps, engine.skips) == (steps, skips + 1), f"with '{name}' a skipped step is counted wrong")
    _say(distance(_weights(engine), before) == 0, f"with '{name}' a skipped step changes the weights")


def _on_rank(
    make: Callable[[], nn.Module], tables: Tables, plugins: Mapping[str, Any] | None, world: int
) -> tuple[list[float], dict[str, Tensor], bool]:
    """On `world` ranks each takes its own samples; a world of 0 is one rank that takes those of two."""
    engine = prepare(make().double(), tables, plugins=plugins)
    rank = dist.get_rank()
    losses = _steps(
        engine,
        range(STEPS),
        lambda step, micro: [tokens(step, micro, rank)] if world else [tokens(step, micro, r) for r in range(2)],
    )
    wide = all(dtype.dtype == torch.float64 for dtype in engine.model.parameters())
    weights = _weights(engine)
    engine.close()
    return losses, weights, wide


def _check_ranks(
    name: str,
    make: Callable[[], nn.Module],
    tables: Tables,
    plugins: Mapping[str, Any] | None,
    ranks: Ranks,
    tolerance: float | None,
) -> None:
    (one,) = ranks.run(_on_rank, make, tables, plugins, 0, world=1)
    two = ranks.run(_on_rank, make, tables, plugins, 2, world=2)
    same = all(torch.equal(tensor, two[1][1][key]) for key, tensor in two[0][1].items())
    _say(same, f"with '{name}' two ranks end in different weights")
    allowed = tolerance if tolerance is not None else (1e-9 if one[2] else 2e-2)
    off = max(distance(two[0][1], one[1]), largest(two[0][0], one[0]))
    _say(off <= allowed, f"with '{name}' two ranks are off by {off:.1e} from one rank with the same samples")


def _transport_on_rank(make: Callable[[], nn.Module], tables: Tables, plugins: Mapping[str, Any] | None) -> None:
    engine = prepare(make().double(), tables, plugins=plugins)
    check_transport(engine)
    engine.close()


def refuses(manifest: Tables, words: str, plugins: Mapping[str, Any] | None = None) -> None:
    """Check that a combination is refused before anything is trained, and that the error says `words`."""
    try:
        prepare(Tangle(), manifest, plugins=plugins)
    except DsxError as error:
        _say(words in str(error), f"the refusal does not say {words!r}:\n{error}")
        return
    raise AssertionError(f"the combination is not refused: {manifest}")
