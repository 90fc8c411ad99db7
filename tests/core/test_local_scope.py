"""A rule that wants each rank's own gradient: what it is lent, and that nothing else travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.contracts import Hyper, Job, Piece, Rule, Scope, Transport
from dsx.errors import CheckpointError
from dsx.plugin import Descriptor, Fill, Need, Part, hook
from dsx.testing import CountingPlugin, distance, largest, train_plain, weights_of
from dsx.testing.models import Tangle, tokens

STEPS, RATE = 4, 0.05


class OwnMean(Rule):
    """SGD that averages gradients by itself from update 3 on."""

    communicates, hyper = True, Hyper(lr=RATE)

    def __init__(self) -> None:
        self.transport = Transport()

    def scope(self, step: int) -> Scope:
        return "local" if step > 2 else "mean"

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> None:
        gradient, param = states["grad"], states["param"]
        if self.scope(job.number) == "local":
            piece = Piece(piece.shard, 0, piece.shard.flat.size)
            assert len(gradient) == len(param) == len(piece)
            self.transport.all_reduce(gradient, "mean", channel="rule", purpose="rule").wait()
        for run in piece.runs(job):
            param[run.where].sub_(gradient[run.where], alpha=run.hyper.lr * job.multiplier)

    def state(self) -> Mapping[str, Any]:
        return {"private": "own_mean"}


class OwnMeanPlugin:
    descriptor = Descriptor(
        "own_mean", "optimize", 1, {"rule": Fill(needs=[Need("gradients.local")])}, None, "of a test"
    )

    @hook
    def dsx_optimize(self) -> list[Part]:
        return [Part("rule", lambda ctx: OwnMean(), lambda rule, ctx: setattr(rule, "transport", ctx.transport))]


PLUGINS = {"own_mean": OwnMeanPlugin(), "counting": CountingPlugin()}


def train(layout: str) -> tuple[list[float | None], dict[str, Tensor], list[set[str]]]:
    """Losses, weights, and the purposes for which each update sent something."""
    tables: dict[str, Any] = {"optimize": {"use": ["own_mean"]}, "communicate": {"use": ["counting"]}}
    if layout != "replicated":
        tables["partition"] = {"use": [layout]}
    engine = dsx.prepare(Tangle().double(), tables, plugins=PLUGINS)
    counted: Any = engine.program.transport
    losses, purposes = [], []
    for step in range(STEPS):
        counted.reset()
        losses.append(engine.train_step([tokens(step, 0, dist.get_rank())]).loss)
        purposes.append({purpose for purpose, count in counted.bytes.items() if count} - {"vote", "admin"})
    weights = weights_of(engine)
    engine.close()
    return losses, weights, purposes


@pytest.mark.parametrize(("layout", "world"), [("replicated", 2), ("zero1", 2), ("zero1", 3)])
def test_a_rule_of_local_scope_is_lent_whole_gradients_and_parameters(ranks, layout: str, world: int) -> None:
    model = Tangle().double()
    losses = train_plain(
        model, tokens, steps=STEPS, world=world, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE)
    )
    usual = {"replicated": {"reduce"}, "zero1": {"reduce", "publish"}}[layout]
    for found, weights, purposes in ranks.run(train, layout, world=world):
        assert largest(found, losses) < 1e-9
        assert distance(weights, weights_of(model)) < 1e-9
        assert purposes == [usual, usual, {"rule"}, {"rule"}]


def test_states_that_are_private_to_a_rule_are_refused_by_another(tmp_path) -> None:
    engine = dsx.prepare(Tangle(), {"optimize": {"use": ["own_mean"]}}, plugins=PLUGINS)
    engine.save(tmp_path / "saved")
    with pytest.raises(CheckpointError, match="are those of own_mean, which no other can go on with") as raised:
        dsx.prepare(Tangle(), {}).load(tmp_path / "saved")
    assert "resume with own_mean, or start from the weights alone" in str(raised.value)
