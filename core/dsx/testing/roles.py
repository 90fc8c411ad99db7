"""What the contract of each role says, as checks of a prepared engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dsx.contracts import ALIGNMENT, Evaluation, Flat, Job, Piece, Report, RunInfo, Segment, Shard, Store, Watcher
from dsx.engine import Engine

Check = Callable[[Engine], None]


def _say(holds: bool, words: str) -> None:
    if not holds:
        raise AssertionError(words)


def check_schedule(engine: Engine) -> None:
    """A pure function of the step, with finite rates that keep the groups' proportions."""
    schedule, base = engine.program.schedule, engine.program.hypers
    groups = {"one": next(iter(base.values())), "two": next(iter(base.values()))}
    groups["two"] = groups["two"].replace(lr=groups["one"].lr / 4)
    steps = [1, 2, 3, 5, 10, 100, 1000, 3, 1]
    seen: dict[int, float] = {}
    for step in steps:
        at = schedule.at(step, groups)
        rate = at["one"].lr
        _say(seen.setdefault(step, rate) == rate, f"the schedule is no pure function: step {step} gave two rates")
        _say(math.isfinite(rate) and rate >= 0, f"the schedule gives the rate {rate} at step {step}")
        _say(math.isclose(at["two"].lr * 4, rate, abs_tol=1e-30), "the schedule does not keep the groups' proportions")
        _say(set(at["one"]) == set(groups["one"]), "the schedule adds or loses hyperparameters")


def check_groups(engine: Engine) -> None:
    """Every trained parameter is in a group that has the rule's numbers."""
    hypers = engine.program.hypers
    flats = [flat for unit in engine.program.layout.units for flat in unit.flats if flat.trainable]
    for segment in (segment for flat in flats for segment in flat.segments):
        known = ", ".join(f"'{name}'" for name in hypers)
        _say(segment.group in hypers, f"'{segment.name}' is in the group '{segment.group}', hypers() gives {known}")
    first = next(iter(hypers.values()))
    for name, hyper in hypers.items():
        _say(set(hyper) == set(first), f"the group '{name}' has {sorted(hyper)}, and not {sorted(first)}")
        rate = hyper.get("lr", 0.0)
        _say(math.isfinite(rate) and rate >= 0, f"the group '{name}' has the rate {rate}")


def check_guard(engine: Engine) -> None:
    """Sum of squares, Inf and NaN shown in it, for every floating dtype and size."""
    squares = engine.program.guard.squares
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for size in (0, 1, 15, 16, 17, 4097):
            tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)
            found, right = squares(tensor).item(), tensor.double().square().sum().item()
            _say(
                math.isclose(found, right, rel_tol=1e-4, abs_tol=1e-12),
                f"squares of {size} {dtype}: {found}, not {right}",
            )
            for bad in (math.inf, -math.inf, math.nan):
                if size:
                    tensor[size // 2] = bad
                    _say(not math.isfinite(squares(tensor).item()), f"{bad} in {size} {dtype} does not show in squares")


def check_scaler(engine: Engine) -> None:
    """Scales the loss by its value; state() and load() carry it over."""
    scaler = engine.program.scaler
    loss = torch.tensor(0.37, dtype=torch.float64)
    _say(math.isclose(scaler.scale(loss).item(), 0.37 * scaler.value, rel_tol=1e-6), "scale(loss) is not loss * value")
    for finite in (True, False, True):
        scaler.update(finite)
        _say(math.isfinite(scaler.value) and scaler.value > 0, f"the scale became {scaler.value}")
    kept, value = dict(scaler.state()), scaler.value
    scaler.update(False)
    scaler.load(kept)
    _say(scaler.value == value, "load(state()) does not bring the scale back")


def check_observers(engine: Engine) -> None:
    """Takes every event of a run."""
    for observer in engine.program.observers:
        observer.start(RunInfo("check", 3, 10, 1, 2, 7))
        observer.report(Report(step=1, stepped=True, loss=1.0, norm=0.5, multiplier=1.0, lr={"all": 0.1}))
        observer.report(Report(step=1, stepped=False))
        observer.report(Report(step=1, stepped=False, skipped=True, skips=1, loss=math.inf, norm=math.nan))
        observer.evaluated(Evaluation(1, 2.0, 4, 0.1))
        observer.finish()


def check_rule(engine: Engine) -> None:
    """Bits independent of how a shard is cut; multiplier honoured; unused parameters and padding untouched."""
    rule = engine.program.rule
    reserved = {"param", "grad", "master"} & {state.name for state in rule.states}
    _say(not reserved, f"the rule names a state {', '.join(reserved)}, which is core's own")
    if rule.communicates or rule.sums:
        return
    whole, weights = _update(engine, cuts=(), factor=1.0)
    for cuts, factor, words in (
        (_cuts(engine), 1.0, "depends on how a shard is cut into pieces"),
        ((), 4.0, "does not multiply the gradient by job.multiplier"),
    ):
        found, _ = _update(engine, cuts, factor)
        for name, tensor in whole.items():
            _say(torch.equal(found[name], tensor), f"the rule {words}: '{name}' differs")
    flat = _flat(engine)
    inside = torch.zeros(flat.size, dtype=torch.bool)
    for segment in flat.segments:
        inside[segment.start : segment.stop] = segment.index != 1
    _say(torch.equal(whole["master"][~inside], weights[~inside]), "the rule changes padding or an unused parameter")
    _say(not torch.equal(whole["master"][inside], weights[inside]), "the rule changes nothing")


def _flat(engine: Engine) -> Flat:
    """Three parameters, the second of them unused in the job."""
    step = math.lcm(ALIGNMENT, engine.program.rule.block)
    group = next(iter(engine.program.hypers))
    segments, start = [], 0
    for index, size in enumerate((67, 40, 3 * step)):
        segments.append(Segment(f"p{index}", start, start + size, torch.Size([size]), group, index))
        start += -(-size // step) * step
    return Flat("check", torch.float64, torch.float64, True, tuple(segments), (), start)


def _cuts(engine: Engine) -> tuple[int, ...]:
    flat, block = _flat(engine), engine.program.rule.block
    between = (flat.segments[2].start,)
    return between if engine.program.rule.whole else (block * max(1, 32 // block), *between)


def _update(engine: Engine, cuts: tuple[int, ...], factor: float) -> tuple[Mapping[str, Tensor], Tensor]:
    """Two updates of the flat parameter in pieces, from gradients scaled by `factor`."""
    rule, flat = engine.program.rule, _flat(engine)
    shard = Shard(flat, 0, flat.size, (0, flat.size))
    noise = torch.Generator().manual_seed(1)
    inside = torch.zeros(flat.size, dtype=torch.float64)
    for segment in flat.segments:
        inside[segment.start : segment.stop] = 1
    states = {"master": torch.randn(flat.size, dtype=torch.float64, generator=noise) * inside}
    weights = states["master"].clone()
    for state in rule.states:
        size = {"element": flat.size, "segment": len(flat.segments), "block": flat.size // rule.block}[state.shape]
        states[state.name] = torch.zeros(size, dtype=state.dtype or torch.float64)
    hypers = engine.program.hypers
    for step in (1, 2):
        gradient = torch.randn(flat.size, dtype=torch.float64, generator=noise) * inside * factor
        job = Job(hypers, 1 / factor, [True, False, True], [step, 0, step], step)
        for start, stop in zip((0, *cuts), (*cuts, flat.size), strict=True):
            piece = Piece(shard, start, stop)
            each = {state.name: rule.block for state in rule.states if state.shape == "block"}
            whole = {state.name for state in rule.states if state.shape == "segment"}
            views = {
                name: tensor if name in whole else tensor[start // each.get(name, 1) : stop // each.get(name, 1)]
                for name, tensor in states.items()
            }
            views["param"], views["grad"] = views["master"], gradient[start:stop].clone()
            rule.update(piece, views, job, torch.zeros(0, 3, dtype=torch.float64))
    return states, weights


def check_dtypes(engine: Engine) -> None:
    """Floating dtypes; masters no narrower than parameters; sums over micro-batches in at least fp32."""
    dtypes = engine.program.dtypes
    for source in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        live = dtypes.param("blocks.0.up.weight", source)
        _say(live.is_floating_point, f"a {source} parameter would live in {live}")
        master = dtypes.master(live, source)
        _say(master.is_floating_point and master.itemsize >= live.itemsize, f"the master of {live} would be {master}")
        total = dtypes.accumulate(live, 2)
        _say(total.itemsize >= 4, f"gradients of {live} would add up over micro-batches in {total}")
        one = dtypes.accumulate(live, 1)
        _say(one.is_floating_point, f"gradients of {live} would be {one}")


def check_store(engine: Engine) -> None:
    """What is put is what is fetched; `into` is filled at any alignment; parts too."""
    store, key = engine.program.store, "check"
    first = torch.arange(101, dtype=torch.float32)
    names = sorted({state.name for state in engine.program.rule.states} or {"exp_avg"})
    for name in names:
        store.create(key, name, first.clone())
    _say(sorted(store.names(key)) == names, f"the store knows {list(store.names(key))} of the states {names}")
    store.prefetch(key, names)
    held = store.fetch(key, names)
    _say(all(torch.equal(held[name], first) for name in names), "a state that was created is not what is fetched")
    for tensor in held.values():
        tensor.mul_(2)
    store.put(key, dirty=names)
    store.drain()
    name, room = names[0], torch.full((104,), -1.0)
    _say(store.fetch(key, [name], into=room[1:102]) == {}, "fetch(into=...) lends a tensor besides filling `into`")
    filled = torch.equal(room[1:102], first * 2) and room[102].item() == -1
    _say(filled, "fetch(into=...) does not fill `into` with the state")
    store.fetch(key, [], [name])[name].fill_(7)
    store.put(key, dirty=[name])
    _say(bool((store.fetch(key, [name])[name] == 7).all()), "a state that was only written is not kept")
    store.put(key, clean=[name])
    _check_spans(store, key, name)
    if store.alternate(key, names):
        _check_second_values(store, key, names)


def _check_spans(store: Store, key: str, name: str) -> None:
    """Neighbouring parts at any alignment, written and read again while others are on their way."""
    spans = [(0, 1), (1, 34), (34, 97), (97, 101)]
    for number, span in enumerate(spans):
        for following in spans[number + 1 : number + 2]:
            store.prefetch(key, [name], following)
        part = store.fetch(key, [name], span=span)[name]
        _say(part.numel() == span[1] - span[0], f"fetch(span={span}) lends {part.numel()} elements")
        part.add_(number)
        store.put(key, dirty=[name])
    right = torch.cat([torch.full((stop - start,), 7.0 + number) for number, (start, stop) in enumerate(spans)])
    _say(torch.equal(store.fetch(key, [name])[name], right), "parts of a state that were changed in turn are not kept")
    store.put(key, clean=[name])


def _check_second_values(store: Store, key: str, names: Sequence[str]) -> None:
    """What is put aside is not seen until it is kept, and never if it is forgotten."""

    def values() -> list[float]:
        held = store.fetch(key, names)
        found = [float(held[name].sum()) for name in names]
        store.put(key, clean=names)
        return found

    for kept in (True, False, True):
        before = values()
        store.aside(key, names)
        for tensor in store.fetch(key, names).values():
            tensor.add_(1)
        store.put(key, dirty=names)
        _say(values() == before, "a state that was put aside is fetched before it is kept")
        (store.keep if kept else store.forget)(key, names)
        right = [number + 101 * kept for number in before]
        _say(values() == right, f"a state that was put aside is not there after {'keep' if kept else 'forget'}()")


def check_layout(engine: Engine) -> None:
    """Every parameter is in one flat parameter, and comes back whole, in its own shape, by its own name."""
    layout, model = engine.program.layout, engine.model
    placed = [name.name for unit in layout.units for flat in unit.flats for name in flat.segments]
    known = {name: parameter.shape for name, parameter in model.named_parameters()}
    _say(sorted(placed) == sorted(known), f"not in exactly one flat parameter: {sorted(set(placed) ^ set(known))}")
    with engine.gathered(model):
        whole = {name: parameter.shape for name, parameter in model.named_parameters()}
    _say(whole == known or not any(known.values()), "parameters are not whole within `gathered`")
    shapes = {name: tensor.shape for name, tensor in engine.weights()}
    _say(shapes.keys() == known.keys(), f"weights() does not give {sorted(known.keys() ^ shapes.keys())}")
    _say(all(shapes[name] == whole[name] for name in shapes), "weights() gives tensors of other shapes")
    block = engine.program.rule.block
    trained = {s.name: s.shape for unit in layout.units for f in unit.flats if f.trainable for s in f.segments}
    for state in engine.program.rule.states:
        kinds = {
            "element": trained,
            "segment": dict.fromkeys(trained, torch.Size(())),
            "block": {name: torch.Size([-(-shape.numel() // block)]) for name, shape in trained.items()},
        }
        found = {name: tensor.shape for name, tensor in layout.logical(state.name)}
        _say(found == kinds[state.shape], f"logical('{state.name}') gives other names or shapes than those trained")
    for shard in layout.shards:
        inside = shard.start <= shard.owned[0] <= shard.owned[1] <= shard.stop
        _say(inside, f"the shard of '{shard.key}' does not hold what this rank owns of it")


def check_early_gradients(engine: Engine, make: Callable[[], Tensor]) -> None:
    """A watcher hears of every shard in the last backward of a window, with the gradient that the vote is about.

    make  a loss of the engine's model
    """
    layout, seen = engine.program.layout, _Seen(engine)
    layout.watch(seen)
    for number in range(engine.accumulation):
        engine.backward(make())
        if number + 1 < engine.accumulation:
            _say(not seen.gradients, "a gradient is said to be final within a window")
            engine.step()
    for shard in layout.shards:
        _say(shard in seen.gradients, f"the gradient of '{shard.key}' is not said to be final when backward is over")
    layout.finish()
    for shard, gradient in seen.gradients.items():
        _say(torch.equal(gradient, layout.gradient_of(shard)), f"the gradient of '{shard.key}' changed after `final`")
    engine.step()


class _Seen(Watcher):
    """Copies of gradients that were final."""

    def __init__(self, engine: Engine) -> None:
        self._layout = engine.program.layout
        self.gradients: dict[Shard, Tensor] = {}

    def final(self, shard: Shard) -> None:
        self.gradients[shard] = self._layout.gradient_of(shard).clone()

    def revoked(self, shard: Shard) -> None:
        self.gradients.pop(shard, None)

    def wanted(self, shard: Shard) -> None:
        """No update is under way."""
        return


def check_attention(engine: Engine) -> None:
    """Every claimed site keeps shapes and dtypes, at any length, with finite gradients."""
    for module in engine.model.modules():
        attend = getattr(module, "attend", None)
        if not callable(attend):
            continue
        for length in (1, 17, 64):
            q, k, v = (torch.randn(2, 3, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))
            out = attend(q, k, v, causal=True)
            _say(out.shape == q.shape and out.dtype == q.dtype, f"attend() gives {list(out.shape)} {out.dtype}")
            out.square().sum().backward()
            grads = [tensor.grad for tensor in (q, k, v)]
            _say(all(g is not None and bool(g.isfinite().all()) for g in grads), "attend() has gradients not finite")


def check_transport(engine: Engine) -> None:
    """What every operation delivers, on each rank of a group; entered by all of them."""
    x = engine.program.transport
    exact = [purpose for purpose in ("reduce", "state", "admin", "vote") if purpose not in x.lossy]
    _say({"state", "admin", "vote"} <= set(exact), f"purposes that are never altered are lossy: {sorted(x.lossy)}")
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for purpose in exact:
            _check_operations(engine, dtype, purpose)
    poison = torch.full((8 * x.world,), math.inf if x.rank == 0 else 1.0)
    x.all_reduce(poison, "mean", channel="reduce", purpose="reduce").wait()
    _say(not bool(poison.isfinite().any()), "a non-finite input of one rank does not reach all of them")


def _check_operations(engine: Engine, dtype: torch.dtype, purpose: Any) -> None:
    x, size = engine.program.transport, 6
    parts = [torch.arange(size * x.world).remainder(7).add(rank).to(dtype) for rank in range(x.world)]
    mine, total = parts[x.rank], torch.stack(parts).sum(0)
    here = slice(x.rank * size, (x.rank + 1) * size)
    out = torch.empty(size * x.world, dtype=dtype)
    shard = torch.full((size,), x.rank + 1).to(dtype)
    where: dict[str, Any] = {"channel": "reduce", "purpose": purpose}
    x.all_gather(out, shard, **where).wait()
    gathered = torch.arange(1, x.world + 1).repeat_interleave(size).to(dtype)
    _say(torch.equal(out, gathered), f"all_gather of {dtype} for '{purpose}' does not keep rank order")
    out[here] = 9
    x.all_gather(out, out[here], **where).wait()
    _say(bool((out == 9).all()), f"all_gather of {dtype} into its own slice")
    for op in ("sum", "mean") if dtype.is_floating_point else ("sum",):
        right = total if op == "sum" else (total.double() / x.world).to(dtype)
        reduced, whole = torch.empty(size, dtype=dtype), mine.clone()
        x.reduce_scatter(reduced, mine.clone(), op, **where).wait()
        _say(torch.equal(reduced, right[here]), f"reduce_scatter {op} of {dtype} for '{purpose}'")
        handle = x.all_reduce(whole, op, **where)
        handle.wait()
        handle.wait()
        _say(torch.equal(whole, right), f"all_reduce {op} of {dtype} for '{purpose}'")
    sent = [torch.full((1 + peer,), 10 * x.rank + peer).to(dtype) for peer in range(x.world)]
    came = [torch.empty(1 + x.rank, dtype=dtype) for _ in range(x.world)]
    x.all_to_all(came, sent, **where).wait()
    swapped = [torch.full((1 + x.rank,), 10 * peer + x.rank).to(dtype) for peer in range(x.world)]
    _say(all(map(torch.equal, came, swapped)), f"all_to_all of uneven {dtype} tensors for '{purpose}'")
    word = torch.full((3,), x.rank + 5).to(dtype)
    x.broadcast(word, x.world - 1, **where).wait()
    _say(bool((word == x.world + 4).all()), f"broadcast of {dtype} from the last rank")


ROLE_CHECKS: Mapping[str, Check] = {
    "dtypes": check_dtypes,
    "groups": check_groups,
    "tiers": check_store,
    "layout": check_layout,
    "attention": check_attention,
    "schedule": check_schedule,
    "guard": check_guard,
    "scaler": check_scaler,
    "observers": check_observers,
    "rule": check_rule,
}
