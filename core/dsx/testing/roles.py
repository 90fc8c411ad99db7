"""What the contract of each role says, as checks of a prepared engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from dsx.contracts import ALIGNMENT, Evaluation, Flat, Job, Piece, Report, RunInfo, Segment, Shard
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
        size = len(flat.segments) if state.shape == "segment" else flat.size
        states[state.name] = torch.zeros(size, dtype=state.dtype or torch.float64)
    hypers = engine.program.hypers
    for step in (1, 2):
        gradient = torch.randn(flat.size, dtype=torch.float64, generator=noise) * inside * factor
        job = Job(hypers, 1 / factor, [True, False, True], [step, 0, step], step)
        for start, stop in zip((0, *cuts), (*cuts, flat.size), strict=True):
            piece = Piece(shard, start, stop)
            whole = {state.name for state in rule.states if state.shape == "segment"}
            views = {name: tensor if name in whole else tensor[start:stop] for name, tensor in states.items()}
            views["param"], views["grad"] = views["master"], gradient[start:stop].clone()
            rule.update(piece, views, job, torch.zeros(0, 3, dtype=torch.float64))
    return states, weights


ROLE_CHECKS: Mapping[str, Check] = {
    "schedule": check_schedule,
    "guard": check_guard,
    "scaler": check_scaler,
    "observers": check_observers,
    "rule": check_rule,
}
