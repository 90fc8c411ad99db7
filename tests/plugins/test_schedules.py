"""The schedules: their values as functions of the step, and what a run makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dsx
from dsx.contracts import Hyper
from dsx.errors import DsxError, ManifestError
from dsx.testing.plain import distance, train_plain, weights_of
from dsx_schedules import one_cycle, phases, warmup, warmup_cosine, warmup_linear, warmup_log, wsd

BASE = 0.02
CURVES = {"warmup_linear": warmup_linear.curve, "warmup_log": warmup_log.curve}

ratios = st.floats(0, 1)
starts = st.floats(0, 0.99)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    """(warm-up, total), either of which may be as long as the other allows."""
    total = draw(st.integers(1, 2000))
    return draw(st.integers(0, total)), total


Factor = Callable[[int], float]


def settings(name: str, options: Mapping[str, Any], steps: int | None = None, **optimize: Any) -> dict[str, Any]:
    use = optimize.pop("rule", "sgd")
    made: dict[str, Any] = {"optimize": {"use": [use, name], name: dict(options), "sgd": {"lr": BASE}, **optimize}}
    if use != "sgd":
        del made["optimize"]["sgd"]
    return made | ({"run": {"steps": steps}} if steps else {})


def rates(name: str, options: Mapping[str, Any], upto: int, steps: int | None = None) -> list[float]:
    """The ratio of each update's learning rate to the optimizer's, as the built schedule gives it."""
    program = dsx.prepare(nn.Linear(1, 1), settings(name, options, steps)).program
    return [program.schedule.at(step, program.hypers)["all"].lr / BASE for step in range(1, upto + 1)]


def refused(made: Mapping[str, Any]) -> str:
    with pytest.raises(DsxError) as caught:
        dsx.prepare(nn.Linear(1, 1), made)
    return str(caught.value)


def close(found: list[float], expected: list[float]) -> bool:
    return found == pytest.approx(expected, rel=1e-12, abs=1e-15)


# the shapes, as functions of any span


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@given(span=spans(), start=starts, final=ratios, decays=st.booleans())
def test_warmup_rises_to_its_peak_and_falls_to_its_end(
    curve: warmup.Curve, span: tuple[int, int], start: float, final: float, decays: bool
) -> None:
    length, total = span

    def factor(step: int) -> float:
        return warmup.factor(step, curve, length, total if decays else None, start, final)

    check(factor, length, total, start, final if decays else 1.0)


@given(span=spans(), start=starts, final=ratios)
def test_cosine_rises_to_its_peak_and_falls_to_its_end(span: tuple[int, int], start: float, final: float) -> None:
    check(lambda step: warmup_cosine.factor(step, *span, start, final), *span, start, final)


@given(span=spans(), rest=ratios, shape=st.sampled_from(list(wsd.SHAPES)), start=starts, final=ratios)
def test_wsd_rises_stays_and_falls(
    span: tuple[int, int], rest: float, shape: wsd.Shape, start: float, final: float
) -> None:
    length, total = span
    decay = int((total - length) * rest)

    def factor(step: int) -> float:
        return wsd.factor(step, length, decay, total, shape, start, final)

    stable = range(max(length, 1), total - decay + 1)
    assert all(factor(step) == 1.0 for step in {*stable[:2], *stable[-2:]})
    assert factor(total + 1) == final
    if decay:
        check(factor, length, total, start, final)


def ascends(values: list[float]) -> bool:
    return all(later >= earlier - 1e-12 for earlier, later in pairwise(values))


def check(factor: Factor, length: int, total: int, start: float, end: float) -> None:
    """Case 7: defined everywhere, warm-up = total and no warm-up included; the peak is 1, exactly."""
    rising = [factor(step) for step in range(1, length + 1)]
    falling = [factor(step) for step in range(max(length, 1), total + 1)]
    assert ascends(rising)
    assert ascends(falling[::-1])
    assert all(min(start, end) - 1e-12 <= value <= 1.0 for value in rising + falling)
    if length:
        assert factor(length) == 1.0
        assert factor(1) > start
    if length < total:
        assert factor(total) == factor(total + 1) == factor(10 * total) == end


@given(up=st.integers(1, 500), down=st.integers(1, 500), start=starts, final=ratios, stairs=st.integers(0, 9))
def test_one_cycle_passes_its_three_points(up: int, down: int, start: float, final: float, stairs: int) -> None:
    options = one_cycle.Options(
        up=up, down=down, start=start, final=final, up_stairs=min(stairs, up), down_stairs=min(stairs, down)
    )
    assert one_cycle.factor(up, options) == 1.0
    assert one_cycle.factor(up + down, options) == one_cycle.factor(up + down + 99, options) == final
    rising = [one_cycle.factor(step, options) for step in range(1, up + 1)]
    assert ascends(rising)
    assert one_cycle.factor(1, options) > start


@given(first=ratios, last=ratios, part=ratios)
def test_between_is_exact_at_its_ends(first: float, last: float, part: float) -> None:
    assert phases.between(first, last, 0.0) == first
    assert phases.between(first, last, 1.0) == last
    assert min(first, last) - 1e-12 <= phases.between(first, last, part) <= max(first, last) + 1e-12


# the values of a run


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("constant", {}, [1, 1, 1, 1, 1, 1]),
        ("warmup_linear", {"warmup": 4}, [0.25, 0.5, 0.75, 1, 1, 1]),
        ("warmup_linear", {"warmup": 2, "start": 0.5, "total": 4}, [0.75, 1, 0.5, 0, 0, 0]),
        ("warmup_linear", {"warmup": 1, "final": 0.2}, [1, 0.84, 0.68, 0.52, 0.36, 0.2]),
        ("warmup_linear", {"warmup": 0.5}, [1 / 3, 2 / 3, 1, 1, 1, 1]),
        ("warmup_linear", {"warmup": 0}, [1, 1, 1, 1, 1, 1]),
        ("warmup_log", {"warmup": 3}, [0.5, math.log(3) / math.log(4), 1, 1, 1, 1]),
        ("warmup_log", {"warmup": 1}, [1, 1, 1, 1, 1, 1]),
        ("warmup_log", {"warmup": 3, "total": 5, "final": 0.5}, [0.5, math.log(3) / math.log(4), 1, 0.75, 0.5, 0.5]),
        (
            "warmup_cosine",
            {"warmup": 2, "final": 0.5},
            [0.5, 1, 0.5 + (1 + 2**-0.5) / 4, 0.75, 0.5 + (1 - 2**-0.5) / 4, 0.5],
        ),
        ("warmup_cosine", {"warmup": 0, "total": 2}, [0.5, 0, 0, 0, 0, 0]),
        ("warmup_cosine", {"warmup": 6}, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1]),
        ("wsd", {"warmup": 1, "decay": 4, "shape": "linear"}, [1, 1, 0.75, 0.5, 0.25, 0]),
        (
            "wsd",
            {"warmup": 1, "decay": 4, "shape": "sqrt", "final": 0.5},
            [1, 1, 0.75, 1 - 0.5**1.5, 1 - 0.75**0.5 / 2, 0.5],
        ),
        ("wsd", {"warmup": 0.5, "decay": 0.5, "shape": "cosine"}, [1 / 3, 2 / 3, 1, 0.75, 0.25, 0]),
        ("wsd", {"warmup": 2, "decay": 0, "total": 4}, [0.5, 1, 1, 1, 0, 0]),
        ("one_cycle", {"up": 2, "start": 0.5, "final": 0}, [0.75, 1, 0.5, 0, 0, 0]),
        ("one_cycle", {"up": 1, "down": 4, "final": 0.2}, [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("lr_range_test", {"start": 0.1, "growth": 2, "every": 2}, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
        ("lr_range_test", {"start": 0.1, "every": 2, "staircase": True}, [0.1, 0.1, 0.2, 0.2, 0.3, 0.3]),
    ],
)
def test_learning_rates_of_six_updates(name: str, options: dict[str, Any], expected: list[float]) -> None:
    """Cases 7 and 8: the peak is the optimizer's own learning rate, whatever the spans."""
    assert close(rates(name, options, 6, steps=6), expected)


def test_stairs_of_one_cycle_are_visible() -> None:
    """Case 10."""
    found = rates("one_cycle", {"up": 6, "up_stairs": 3, "down": 4, "down_stairs": 2, "start": 0.1, "final": 0}, 11)
    assert close(found, [0.4, 0.4, 0.7, 0.7, 1, 1, 0.5, 0.5, 0, 0, 0])


@pytest.mark.parametrize("name", ["warmup_linear", "warmup_log", "warmup_cosine", "wsd", "one_cycle", "lr_range_test"])
def test_the_first_update_moves_the_weights_by_default(name: str) -> None:
    assert 0 < rates(name, {"up": 50} if name == "one_cycle" else {}, 1, steps=100)[0] < 1


def test_groups_keep_their_proportions() -> None:
    groups = {"slow": Hyper(lr=1.0, eps=1e-8), "fast": Hyper(lr=4.0, eps=1e-6)}
    found = phases.Factors(lambda step: 0.5 * step).at(3, groups)
    assert found == {"slow": Hyper(lr=1.5, eps=1e-8), "fast": Hyper(lr=6.0, eps=1e-6)}
    assert groups["slow"].lr == 1.0


@pytest.mark.parametrize(
    ("rule", "options", "read"),
    [
        ("sgd", {"momentum": 0.9}, lambda hyper: hyper.momentum),
        ("adamw", {"betas": [0.9, 0.98]}, lambda hyper: hyper.betas[0]),
        ("torch_optimizer", {"name": "RMSprop", "arguments": {"momentum": 0.9}}, lambda hyper: hyper.momentum),
    ],
)
def test_momentum_goes_against_the_learning_rate(
    rule: str, options: dict[str, Any], read: Callable[[Hyper], float]
) -> None:
    cycle = {"up": 2, "start": 0, "final": 0, "momentum": [0.85, 0.95]}
    made = {"optimize": {"use": [rule, "one_cycle"], rule: options, "one_cycle": cycle}}
    program = dsx.prepare(nn.Linear(1, 1), made).program
    found = [program.schedule.at(step, program.hypers)["all"] for step in range(1, 6)]
    assert close([read(hyper) for hyper in found], [0.9, 0.85, 0.9, 0.95, 0.95])
    assert close([hyper.lr / program.hypers["all"].lr for hyper in found], [0.5, 1, 0.5, 0, 0])
    if rule == "adamw":
        assert {hyper.betas[1] for hyper in found} == {0.98}


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


class Fit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.linear(inputs) - targets).square().mean()


def test_a_run_is_the_plain_loop_with_these_rates() -> None:
    """A skipped step does not move the schedule on (case 64); the report has the learning rate that was used."""
    made = settings("warmup_cosine", {"warmup": 3}, steps=8)
    model, expected = Fit(), Fit()
    engine = dsx.prepare(model, made)
    reported = []
    for step in range(8):
        if step == 2:
            engine.backward(engine(*batch(step, 0, 0)) * math.inf)
            assert engine.step().lr == {}
        engine.backward(engine(*batch(step, 0, 0)))
        reported.append(engine.step().lr["all"] / BASE)
    train_plain(
        expected,
        batch,
        steps=8,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=BASE, fused=True),
        rate=lambda step: warmup_cosine.factor(step, 3, 8, 0.0, 0.0),
    )
    assert close(reported, [warmup_cosine.factor(step, 3, 8, 0.0, 0.0) for step in range(1, 9)])
    assert distance(weights_of(model), weights_of(expected)) < 1e-6, "kernels round the last bit differently"


# refusals


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("warmup_cosine", {"warmup": 1}),
        ("wsd", {}),
        ("warmup_linear", {}),
        ("warmup_log", {"warmup": 2, "final": 0.1}),
    ],
)
def test_an_unknown_number_of_updates_is_refused(name: str, options: dict[str, Any]) -> None:
    text = refused(settings(name, options))
    assert f"'{name}' must know how many updates it spans, and neither total nor run.steps is set" in text
    assert f"remedy: set optimize.{name}.total, or run.steps" in text


@pytest.mark.parametrize("name", ["warmup_linear", "warmup_log", "warmup_cosine", "wsd"])
def test_a_warmup_longer_than_the_run_is_refused(name: str) -> None:
    text = refused(settings(name, {"warmup": 11, "decay": 0} if name == "wsd" else {"warmup": 11}, steps=10))
    assert f"of '{name}' take 11" in text
    assert "but it spans only 10" in text
    assert f"raise optimize.{name}.total or run.steps" in text


def test_warmup_and_decay_that_overlap_are_refused() -> None:
    text = refused(settings("wsd", {"warmup": 60, "decay": 0.5, "total": 100}))
    assert "warmup and decay of 'wsd' take 60 + 50 updates, but it spans only 100" in text


@pytest.mark.parametrize(
    ("rule", "options", "words"),
    [
        ("sgd", {}, ["the optimizer's is 0", "give the optimizer a momentum, such as 0.9"]),
        ("torch_optimizer", {"name": "Adagrad"}, ["the optimizer's is not there", "initial_accumulator_value"]),
    ],
)
def test_momentum_that_is_not_there_cannot_be_cycled(rule: str, options: dict[str, Any], words: list[str]) -> None:
    cycle = {"up": 2, "momentum": [0.85, 0.95]}
    text = refused({"optimize": {"use": [rule, "one_cycle"], rule: options, "one_cycle": cycle}})
    assert "'one_cycle' has no momentum to change" in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("one_cycle", {}, "optimize.one_cycle.up: is missing"),
        ("one_cycle", {"up": 3, "up_stairs": 4}, "up_stairs = 4 is more than the 3 updates of up"),
        ("one_cycle", {"up": 3, "down_stairs": 4}, "down_stairs = 4 is more than the 3 updates of down"),
        ("one_cycle", {"up": 3, "momentum": [0.9, 0.8]}, "momentum = [0.9, 0.8] is not in order"),
        ("warmup_linear", {"warmup": -1}, "optimize.warmup_linear.warmup: -1"),
        ("warmup_linear", {"warmup": 1.5}, "a whole number of 0 or more or a number from 0 to 1"),
        ("warmup_cosine", {"final": 2}, "optimize.warmup_cosine.final: 2"),
        ("wsd", {"shape": "squared"}, "optimize.wsd.shape"),
    ],
)
def test_options_out_of_range_are_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        dsx.prepare(nn.Linear(1, 1), settings(name, options, steps=100))
    assert words in str(caught.value)


def test_a_rule_without_a_learning_rate_is_refused() -> None:
    class Built:
        rule = type("Rule", (), {"hyper": Hyper(step_size=1.0)})()

    with pytest.raises(DsxError, match="'wsd' has no learning rate to change") as caught:
        phases.scaled(Built(), "wsd", lambda step: 1.0)  # type: ignore[arg-type]
    assert "the optimizer's options: step_size" in str(caught.value)
