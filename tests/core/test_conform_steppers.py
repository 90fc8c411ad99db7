"""What the conformance kit says of steppers, groups and activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dsx.contracts import Activations, Forward, Groups, Hyper, Job, Shard, Stepper, Unit, Walk
from dsx.plugin import Context, Descriptor, Fill, Part, hook
from dsx.testing import check_plugin


def carrier(role: str, section: str, make: Callable[[Context], Any]) -> dict[str, Any]:
    """A plugin "mine" that fills one role."""

    class Mine:
        descriptor = Descriptor("mine", section, 1, {role: Fill()}, None, "of a test")  # type: ignore[arg-type]

    def parts(options: Any) -> Iterable[Part]:
        return [Part(role, make)]

    setattr(Mine, f"dsx_{section}", staticmethod(hook(parts)))
    return {"mine": Mine()}


class Held(Stepper):
    """Makes an update when the next one is asked for, or when somebody looks."""

    fault = ""

    def __init__(self, ctx: Context) -> None:
        self.rule, self.layout = ctx.rule, ctx.layout
        self.walk = Walk(ctx.rule, ctx.layout, ctx.store)
        self.gradients: dict[Shard, Tensor] = {}
        self.job: Job | None = None

    def start(self, job: Job) -> None:
        self.gradients = {shard: self.layout.gradient_of(shard).clone() for shard in self.layout.shards}
        self.layout.reset()
        self.job = None if self.fault == "lost" and job.number == 3 else job

    def settle(self) -> None:
        job, self.job = self.job, None
        if job is not None:
            nothing = torch.zeros(0, len(job.used), dtype=torch.float64)
            for _ in range(2 if self.fault == "twice" and job.number == 3 else 1):
                self.walk.sweep(
                    lambda piece, states: self.rule.update(piece, states, job, nothing),
                    self.layout.publish,
                    gradient=lambda part: self.gradients[part.piece.shard][slice(*part.span)].clone(),
                    partial=not all(job.used),
                )

    def drain(self) -> None:
        if self.fault != "unseen":
            self.settle()


def with_fault(kind: type[Any], fault: str) -> type[Any]:
    return type(kind.__name__, (kind,), {"fault": fault})


def test_a_stepper_that_keeps_the_contract() -> None:
    check_plugin("mine", plugins=carrier("stepper", "optimize", Held))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("lost", "updates are lost, made twice or out of turn"),
        ("twice", "updates are lost, made twice or out of turn"),
        ("unseen", "a skipped step changes the weights"),  # it settles one that nobody saw
    ],
)
def test_steppers_that_break_it(fault: str, words: str) -> None:
    plugins = carrier("stepper", "optimize", with_fault(Held, fault))
    with pytest.raises(AssertionError, match=words):
        check_plugin("mine", plugins=plugins)


class Slower(Groups):
    """Biases at half the rate."""

    fault = ""

    def assign(self, name: str, parameter: nn.Parameter) -> str:
        return "slow" if name.endswith("bias") else "fast"

    def hypers(self, base: Hyper) -> Mapping[str, Hyper]:
        if self.fault == "numbers":
            return {"fast": base, "slow": Hyper(lr=base.lr / 2)}
        return {"fast": base, "slow": base.replace(lr=math.inf if self.fault == "rate" else base.lr / 2)}


def test_groups_that_keep_the_contract() -> None:
    check_plugin("mine", plugins=carrier("groups", "optimize", lambda ctx: Slower()))


@pytest.mark.parametrize(
    ("fault", "words"), [("numbers", "the group 'slow' has \\['lr'\\], and not"), ("rate", "has the rate inf")]
)
def test_groups_that_break_it(fault: str, words: str) -> None:
    plugins = carrier("groups", "optimize", lambda ctx: with_fault(Slower, fault)())
    with pytest.raises(AssertionError, match=words):
        check_plugin("mine", plugins=plugins)


class Recomputed(Activations):
    """Blocks are computed again in backward."""

    fault = ""

    def wrap(self, unit: Unit, forward: Forward) -> Forward:
        if not unit.name:
            return forward
        return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=self.fault != "noise")


def test_activations_that_keep_the_contract(ranks: Any) -> None:
    check_plugin("mine", plugins=carrier("activations", "partition", lambda ctx: Recomputed()))


def test_activations_that_draw_other_numbers_in_backward() -> None:
    plugins = carrier("activations", "partition", lambda ctx: with_fault(Recomputed, "noise")())
    with pytest.raises(AssertionError, match=r"with 'mine' the first loss is|dropout is off by"):
        check_plugin("mine", plugins=plugins)
