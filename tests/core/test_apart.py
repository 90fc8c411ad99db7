"""A rule whose live parameters are others than the weights between updates: what is saved, shown and edited."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dsx
from dsx.contracts import Hyper, Job, Piece, Rule, Scope, State
from dsx.plugin import Descriptor, Fill, Need, Part, hook
from dsx.run.evaluate import evaluate
from dsx.testing import weights_of
from dsx.testing.models import Tangle, tokens

PRECISION = {"": torch.float32, "bf16": torch.bfloat16}


class Wander(Rule):
    """Weights lose 0.01 in each update; every rank's live parameters are a way of its own from them, after update 1."""

    apart, communicates, hyper = True, True, Hyper(lr=0.01)
    states = (State("way", scope="rank", resize="mean"),)
    goes = False

    def scope(self, step: int) -> Scope:
        return "local"

    def update(self, piece: Piece, states: Mapping[str, Tensor], job: Job, sums: Tensor) -> None:
        self.goes = job.number > 1
        for run in piece.runs(job):
            states["master"][run.where] -= run.hyper.lr
            states["way"][run.where] += 1 + dist.get_rank()
        self.derive(states["param"], states)

    def derive(self, param: Tensor, states: Mapping[str, Tensor]) -> None:
        param.copy_(states["master"] - states["way"] if self.goes else states["master"])

    def state(self) -> Mapping[str, Any]:
        return {"goes": self.goes}

    def load(self, state: Mapping[str, Any]) -> None:
        self.goes = state["goes"]


class WanderPlugin:
    descriptor = Descriptor("wander", "optimize", 1, {"rule": Fill(needs=[Need("gradients.local")])}, None, "of a test")

    @hook
    def dsx_optimize(self) -> list[Part]:
        return [Part("rule", lambda ctx: Wander())]


def wandering(precision: str, seed: int = 0) -> dsx.Engine:
    tables: dict[str, Any] = {"optimize": {"use": ["wander"]}}
    if precision:
        tables["precision"] = {"use": [precision]}
    return dsx.prepare(Tangle(seed=seed), tables, plugins={"wander": WanderPlugin()})


def updated(engine: dsx.Engine, steps: range) -> None:
    for step in steps:
        engine.train_step([tokens(step, 0, dist.get_rank())])


def live(engine: dsx.Engine) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.model.named_parameters()}


class Held:
    """Samples with their own (inputs, targets)."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return tuple(part[0] for part in tokens(90 + index, 0, 0, samples=1))


def shown(precision: str) -> dict[str, Any]:
    engine = wandering(precision)
    updated(engine, range(2))
    found: dict[str, Any] = {"weights": weights_of(engine), "apart": live(engine)}
    with engine.settled(), engine.settled():
        found["within"] = live(engine)
    with engine.gathered("rows"):
        found["gathered"] = live(engine)["rows"]
    found["after"] = live(engine)
    found["evaluation"] = evaluate(engine, Held(), micro=1, device=torch.device("cpu")).loss
    engine.close()
    return found


@pytest.mark.parametrize("precision", PRECISION)
def test_weights_are_what_all_ranks_share_and_settled_shows_them(ranks, precision: str) -> None:
    first, second = ranks.run(shown, precision, world=2)
    for found in (first, second):
        for name, weight in found["weights"].items():
            assert torch.equal(weight, first["weights"][name]), name
            assert torch.equal(found["within"][name], weight.to(found["within"][name].dtype)), name
            assert torch.equal(found["apart"][name], found["after"][name]), name
        assert torch.equal(found["gathered"], found["within"]["rows"])
    weight = first["weights"]["rows"]
    for rank, found in enumerate((first, second)):
        assert torch.allclose(found["apart"]["rows"].float(), weight - 2 * (1 + rank), atol=0.02)
    assert first["evaluation"] == second["evaluation"]


def test_an_evaluation_is_that_of_the_weights(ranks) -> None:
    (found, _) = ranks.run(shown, "", world=2)
    model = Tangle()
    model.load_state_dict({**model.state_dict(), **found["weights"]})
    with torch.no_grad():
        losses = [model(*tokens(90 + index, 0, 0, samples=1)).item() for index in range(3)]
    assert found["evaluation"] == pytest.approx(sum(losses) / 3, rel=1e-6)


def edited_and_resumed(precision: str, path: str) -> list[str]:
    """Names of parameters that an edit or a checkpoint brings elsewhere than it should."""
    engine = wandering(precision)
    updated(engine, range(2))
    before = live(engine)
    with engine.gathered("rows", modify=True), torch.no_grad():
        dict(engine.model.named_parameters())["rows"].fill_(3.0)
    after, weights = live(engine), weights_of(engine)
    wrong = [name for name, tensor in before.items() if name != "rows" and not torch.equal(after[name], tensor)]
    wrong += [] if (weights["rows"] == 3).all() and (after["rows"] == 3 - 2 * (1 + dist.get_rank())).all() else ["rows"]
    engine.save(path)
    again = wandering(precision, seed=4)
    again.load(path)
    wrong += [name for name, tensor in live(again).items() if not torch.equal(after[name], tensor)]
    return wrong


@pytest.mark.parametrize("precision", PRECISION)
def test_an_edit_reaches_the_weights_and_a_checkpoint_brings_every_rank_back_to_where_it_was(
    ranks, tmp_path, precision: str
) -> None:
    """`derive` comes after `load`: here it needs to know that the first update is over."""
    assert ranks.run(edited_and_resumed, precision, str(tmp_path / "saved"), world=2) == [[], []]
