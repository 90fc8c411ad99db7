"""The conformance kit accepts what keeps the contract, and says in words what does not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attrs import define, frozen
from torch import nn

import dsx
from dsx.contracts import (
    Attend,
    Attention,
    Dtypes,
    Guard,
    Handle,
    Hyper,
    Observer,
    Rule,
    Scaler,
    Schedule,
    Site,
    State,
    Tier,
    TransportWrapper,
    Unit,
    Watcher,
    plain_attention,
)
from dsx.contracts.data import Job, Piece
from dsx.defaults.replicated import Replicated
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.resolve import NULL_OFFERS
from dsx.testing import CountingPlugin, check_plugin, refuses
from dsx.testing.models import Tangle
from dsx.testing.roles import ROLE_CHECKS, check_transport


class Mine:
    """A plugin "mine" that fills one role, by reference, so that it can be sent to ranks."""

    def __init__(self, role: str, section: str, make: Any, options: Any = None) -> None:
        self._arguments = (role, section, make, options)
        fills = {role: Fill()}
        self.descriptor = Descriptor("mine", section, 1, fills, options, "of a test")  # type: ignore[arg-type]

        def parts(options: Any, plan: Any) -> Iterable[Part]:
            return [Part(role, lambda ctx: make())]

        setattr(self, f"dsx_{section}", hook(parts))

    def __reduce__(self) -> tuple[Any, ...]:
        return Mine, self._arguments


def carrier(role: str, section: str, make: Any, options: Any = None) -> dict[str, Any]:
    return {"mine": Mine(role, section, make, options)}


class Descent(Rule):
    """Gradient descent with momentum."""

    states = (State("momentum"),)
    hyper = Hyper(lr=0.1)
    fault = ""

    def update(self, piece: Piece, states: Mapping[str, torch.Tensor], job: Job, sums: torch.Tensor) -> None:
        for run in piece.runs(job):
            gradient = states["grad"][run.where] * (1.0 if self.fault == "multiplier" else job.multiplier)
            if self.fault == "cut":
                gradient = gradient / gradient.norm()
            momentum = states["momentum"][run.where].mul_(0.9).add_(gradient)
            states["master"][run.where].sub_(momentum, alpha=run.hyper.lr)
            if states["param"].data_ptr() != states["master"].data_ptr():
                states["param"][run.where].copy_(states["master"][run.where])
        if self.fault == "padding":
            states["master"].mul_(0.99)


def faulty(kind: type[Any], fault: str) -> type[Any]:
    return type(kind.__name__, (kind,), {"fault": fault})


def test_a_rule_that_keeps_the_contract(ranks) -> None:
    check_plugin("mine", plugins=carrier("rule", "optimize", Descent))


class Blockwise(Rule):
    """Gradient descent scaled by a running mean of each block's squares."""

    block, states, hyper = 16, (State("mean", shape="block"),), Hyper(lr=0.01)

    def update(self, piece: Piece, states: Mapping[str, torch.Tensor], job: Job, sums: torch.Tensor) -> None:
        used = torch.zeros(len(piece), dtype=torch.bool)
        for run in piece.runs(job):
            used[run.where] = True
        gradient = states["grad"] * job.multiplier * used
        squares = states["mean"].mul_(0.9).add_(gradient.view(-1, self.block).square().mean(1), alpha=0.1)
        gradient /= squares.sqrt().add(1e-3).repeat_interleave(self.block)
        states["master"].sub_(gradient, alpha=next(iter(job.hypers.values())).lr)
        if states["param"].data_ptr() != states["master"].data_ptr():
            states["param"].copy_(states["master"])


@pytest.mark.parametrize("layout", ["zero1", "zero3", None])
def test_a_rule_of_blocks_keeps_it_under_every_layout(ranks, layout: str | None) -> None:
    beside = {"partition": {"use": [layout]}} if layout else {}
    check_plugin("mine", plugins=carrier("rule", "optimize", Blockwise), beside=beside, ranks=ranks)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", "depends on how a shard is cut"),
        ("multiplier", "does not multiply the gradient"),
        ("padding", "changes parameters that are frozen or have no gradient: never"),
    ],
)
def test_rules_that_break_it(fault: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_plugin("mine", plugins=carrier("rule", "optimize", faulty(Descent, fault)))


class Decay(Schedule):
    fault = ""
    calls = 0

    def at(self, step: int, hypers: Mapping[str, Hyper]) -> Mapping[str, Hyper]:
        Decay.calls += 1
        factor = 1 / (Decay.calls if self.fault == "impure" else step)
        absolute = self.fault == "absolute"
        return {name: hyper.replace(lr=factor if absolute else hyper.lr * factor) for name, hyper in hypers.items()}


def test_a_schedule_that_keeps_the_contract(ranks) -> None:
    check_plugin("mine", plugins=carrier("schedule", "optimize", Decay))


@pytest.mark.parametrize(
    ("fault", "words"), [("impure", "not deterministic|no pure function"), ("absolute", "proportions")]
)
def test_schedules_that_break_it(fault: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_plugin("mine", plugins=carrier("schedule", "optimize", faulty(Decay, fault)))


class Blind(Guard):
    def squares(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.nan_to_num(0.0, 0.0, 0.0).double().square().sum()


class Coarse(Guard):
    def squares(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient[::2].double().square().sum() * 2


@pytest.mark.parametrize(("kind", "words"), [(Blind, "NaN gradient does not skip"), (Coarse, "squares of 1 ")])
def test_guards_that_break_it(kind: type[Guard], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_plugin("mine", plugins=carrier("guard", "precision", kind))


class Halving(Scaler):
    def __init__(self) -> None:
        self.value = 1024.0

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.value

    def update(self, finite: bool) -> None:
        self.value = self.value if finite else self.value / 2

    def state(self) -> Mapping[str, Any]:
        return {"value": self.value}

    def load(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class Forgetful(Halving):
    def load(self, state: Mapping[str, Any]) -> None: ...


def test_a_scaler(ranks) -> None:
    check_plugin("mine", plugins=carrier("scaler", "precision", Halving))
    with pytest.raises(AssertionError, match="does not bring the scale back"):
        check_plugin("mine", plugins=carrier("scaler", "precision", Forgetful))


class Single(Dtypes):
    def param(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def master(self, dtype: torch.dtype, source: torch.dtype) -> torch.dtype:
        return torch.promote_types(dtype, source)


def test_dtypes_with_masters() -> None:
    class Cast(Single):
        def call(self, model: Any, args: Any, kwargs: Any) -> Any:
            model.offset = model.offset.float()
            return model(*args, **kwargs)

    check_plugin("mine", plugins=carrier("dtypes", "precision", Cast))


class Broken(Observer):
    def finish(self) -> None:
        raise RuntimeError("the file is closed")


def test_observers() -> None:
    check_plugin("mine", plugins=carrier("observers", "observe", Observer))
    with pytest.raises(RuntimeError, match="the file is closed"):
        check_plugin("mine", plugins=carrier("observers", "observe", Broken))


class Everywhere(Attention):
    def claim(self, site: Site) -> bool:
        return True

    def bind(self, site: Site) -> Attend:
        return plain_attention


def test_attention() -> None:
    check_plugin("mine", plugins=carrier("attention", "attention", Everywhere))


def test_attention_that_claims_nothing_is_refused() -> None:
    plugins = carrier("attention", "attention", Everywhere)
    refuses({"attention": {"use": ["mine"]}}, "claims none of the model's attention sites", plugins)


def test_the_options_must_be_frozen() -> None:
    @define
    class Loose:
        every: int = 1

    @frozen
    class Tight:
        every: int = 1

    check_plugin("mine", plugins=carrier("schedule", "optimize", Schedule, options=Tight))
    with pytest.raises(AssertionError, match="not frozen"):
        check_plugin("mine", plugins=carrier("schedule", "optimize", Schedule, options=Loose))


def test_a_wrapper(ranks) -> None:
    check_plugin("counting", plugins={"counting": CountingPlugin()}, ranks=ranks)


class Doubling(TransportWrapper):
    """Loses a factor on reductions."""

    def all_reduce(self, tensor: torch.Tensor, op: Any = "mean", *, channel: Any, purpose: Any) -> Any:
        handle = super().all_reduce(tensor, op, channel=channel, purpose=purpose)
        if purpose != "admin":
            return handle
        handle.wait()
        tensor.mul_(2)
        return Handle()


def doubling() -> type[Doubling]:
    return Doubling


def test_a_wrapper_that_breaks_it(ranks) -> None:
    plugins = carrier("wrappers", "communicate", doubling)
    with pytest.raises(AssertionError, match=r"all_reduce sum of torch\.float32 for 'admin'"):
        check_plugin("mine", plugins=plugins, ranks=ranks)


class Narrow(Dtypes):
    def accumulate(self, dtype: torch.dtype, accumulation: int) -> torch.dtype:
        return torch.bfloat16


def test_dtypes_that_break_it() -> None:
    with pytest.raises(AssertionError, match=r"would add up over micro-batches in torch\.bfloat16"):
        check_plugin("mine", plugins=carrier("dtypes", "precision", Narrow))


class Whole(Replicated):
    """Core's own."""


class Layouts:
    def __init__(self, kind: Any) -> None:
        self._kind = kind
        offers = NULL_OFFERS["layout"]
        self.descriptor = Descriptor("mine", "partition", 1, {"layout": Fill(offers=offers)}, summary="of a test")

    @hook
    def dsx_partition(self) -> list[Part]:
        return [Part("layout", self._kind)]


class Memory(Tier):
    fault = ""

    def fetch(
        self, key: str, read: Any = (), write: Any = (), into: torch.Tensor | None = None, span: Any = None
    ) -> Any:
        if into is not None and self.fault == "into":
            return super().fetch(key, read, write)
        if span and self.fault == "span":
            span = (span[0] // 16 * 16, span[0] // 16 * 16 + span[1] - span[0])  # only aligned ones
        return super().fetch(key, read, write, into, span)


def test_a_tier(ranks) -> None:
    check_plugin("mine", plugins=carrier("tiers", "partition", Memory), ranks=ranks)


@pytest.mark.parametrize(("fault", "words"), [("span", "changed in turn are not kept"), ("into", "lends a tensor")])
def test_tiers_that_break_it(fault: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_plugin("mine", plugins=carrier("tiers", "partition", faulty(Memory, fault)))


class Twice(Memory):
    """A tier with second values."""

    alternates = True

    def alternate(self, key: str, names: Sequence[str]) -> bool:
        self.away: dict[tuple[str, str], torch.Tensor] = {}
        return True

    def aside(self, key: str, names: Sequence[str]) -> None:
        self.away = {(key, name): self._tensors[key, name].clone() for name in names}

    def fetch(self, key: str, read: Any = (), write: Any = (), into: Any = None, span: Any = None) -> Any:
        if not getattr(self, "away", None):
            return super().fetch(key, read, write, into, span)
        self.lent = {(key, name): self._tensors[key, name].clone() for name in read}
        return {name: self.lent[key, name] for name in read}

    def put(self, key: str, dirty: Sequence[str] = (), clean: Sequence[str] = ()) -> None:
        if getattr(self, "away", None) and dirty:
            self.away = dict(self.lent)
            if self.fault == "seen":
                self._tensors.update(self.lent)

    def keep(self, key: str, names: Sequence[str]) -> None:
        self._tensors.update(self.away)
        self.away = {}

    def forget(self, key: str, names: Sequence[str]) -> None:
        if self.fault == "kept":
            self._tensors.update(self.away)
        self.away = {}


@pytest.mark.parametrize(("fault", "words"), [("", None), ("seen", "before it is kept"), ("kept", r"after forget\(\)")])
def test_tiers_with_second_values(fault: str, words: str | None) -> None:
    with pytest.raises(AssertionError, match=words) if words else nullcontext():
        check_plugin("mine", plugins=carrier("tiers", "partition", faulty(Twice, fault)))


class Late(Whole):
    def watch(self, watcher: Watcher) -> None:
        """Never says anything."""


class Heedless(Whole):
    def want(self, unit: Unit | None = None) -> None:
        """Uses what it has."""


class Early(Whole):
    def gradient(self, key: str, number: int, parameter: nn.Parameter) -> None:
        super().gradient(key, number, parameter)
        if self.early is not None:
            self.early.final(next(shard for shard in self.shards if shard.key == key))

    early: Watcher | None = None

    def watch(self, watcher: Watcher) -> None:
        self.early = watcher


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Whole, None),
        (Late, "not said to be final"),
        (Early, "final within a window|changed after"),
        (Heedless, "before its shard is wanted"),
    ],
)
def test_layouts_that_say_when_gradients_are_final(kind: Any, words: str | None) -> None:
    plugins = {"mine": Layouts(kind)}
    with pytest.raises(AssertionError, match=words) if words else nullcontext():
        check_plugin("mine", plugins=plugins)


class Shapeless(Everywhere):
    def bind(self, site: Site) -> Attend:
        return lambda q, k, v, mask=None, **choices: plain_attention(q, k, v) * (q.shape[2] != 64 or math.nan)


def test_attention_that_breaks_it() -> None:
    with pytest.raises(AssertionError, match="gradients not finite"):
        check_plugin("mine", plugins=carrier("attention", "attention", Shapeless))


def test_the_null_parts_pass_their_own_checks(ranks) -> None:
    """A plugin that fills nothing leaves every role to core."""
    engine = dsx.prepare(Tangle().double())
    for check in ROLE_CHECKS.values():
        check(engine)
    ranks.run(null_transport, world=4)


def null_transport() -> None:
    check_transport(dsx.prepare(Tangle()))


def test_a_combination_that_is_not_refused_fails() -> None:
    with pytest.raises(AssertionError, match="is not refused"):
        refuses({}, "anything")
