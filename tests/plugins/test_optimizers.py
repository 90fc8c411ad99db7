"""adamw, sgd and torch_optimizer against torch's own classes on plain parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsx
from dsx.contracts import Groups, Hyper
from dsx.errors import DsxError, ManifestError
from dsx.plugin import Context
from dsx.testing.models import Tangle, tokens
from dsx.testing.plain import distance, train_plain, weights_of
from dsx_optimizers import adamw, sgd

STEPS = 7

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def data(step: int, micro: int, rank: int) -> tuple[Any, ...]:
    """The branch `side` of every block is taken in odd steps only, so its parameters are updated fewer times."""
    return (*tokens(step, micro, rank), step % 2 == 1)


def manifest(name: str, options: Mapping[str, Any], **optimize: Any) -> dict[str, Any]:
    return {"optimize": {"use": [name], name: dict(options), **optimize}}


def train(
    settings: Mapping[str, Any], dtype: torch.dtype = torch.float32, rank: int = 0, broken: int | None = None
) -> dict[str, Tensor]:
    """Final weights; before step `broken`, one with a NaN loss is tried."""
    model = Tangle().to(dtype)
    engine = dsx.prepare(model, settings)
    for step in range(STEPS):
        if step == broken:
            engine.backward(engine(*data(step, 0, rank)) * float("nan"))
            assert engine.step().skipped
        engine.backward(engine(*data(step, 0, rank)))
        assert engine.step().stepped
    engine.close()
    return weights_of(model)


def plain(make: Make, dtype: torch.dtype = torch.float32, **choices: Any) -> dict[str, Tensor]:
    model = Tangle().to(dtype)
    train_plain(model, data, steps=STEPS, optimizer=make, **choices)
    return weights_of(model)


def alone(kind: type[torch.optim.Optimizer], **arguments: Any) -> Make:
    """Each parameter in a group of its own: torch's fused SGD cannot take one that starts later than its neighbours."""
    return lambda parameters: kind([{"params": [parameter]} for parameter in parameters], **arguments)


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different
    start = weights_of(Tangle())
    assert not torch.equal(found["blocks.0.side.weight"], start["blocks.0.side.weight"])
    assert torch.equal(found["never"], start["never"])


ADAMW = [
    {},
    {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1},
    {"amsgrad": True, "maximize": True},
]
SGD = [
    {},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01, "maximize": True},
]
ANY: list[tuple[str, dict[str, Any]]] = [
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("NAdam", {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1}),
    ("RAdam", {"lr": 0.01}),
    ("Adagrad", {"initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    ("Adadelta", {"rho": 0.8}),
    ("Adamax", {"betas": [0.8, 0.9]}),
    ("ASGD", {"t0": 2}),
    ("Rprop", {}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
]


@pytest.fixture
def unserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose device dsx has no kernel for."""
    for plugin in (adamw, sgd):
        monkeypatch.setattr(plugin, "served", lambda operation, device: False)


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [("adamw", torch.optim.AdamW, options) for options in ADAMW]
    + [("sgd", torch.optim.SGD, options) for options in SGD],
)
def test_one_pass_trains_like_torch(name: str, kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
    """No further from torch's class than 1e-6, or than its two kernels are from each other where training drives last
    bits apart."""
    fused, plainly = plain(alone(kind, fused=True, **options)), plain(alone(kind, foreach=False, **options))
    found = train(manifest(name, options))
    assert distance(found, plainly) <= max(1e-6, distance(fused, plainly))
    assert torch.equal(found["never"], weights_of(Tangle())["never"])


@pytest.mark.usefixtures("unserved")
@pytest.mark.parametrize("options", ADAMW)
def test_without_a_kernel_adamw_is_torchs_bit_for_bit(options: dict[str, Any]) -> None:
    expected = plain(lambda parameters: torch.optim.AdamW(parameters, fused=True, **options))
    assert_same_bits(train(manifest("adamw", options)), expected)


@pytest.mark.usefixtures("unserved")
@pytest.mark.parametrize("options", SGD)
def test_without_a_kernel_sgd_is_torchs_bit_for_bit(options: dict[str, Any]) -> None:
    assert_same_bits(train(manifest("sgd", options)), plain(alone(torch.optim.SGD, fused=True, **options)))


@pytest.mark.parametrize(("name", "arguments"), ANY, ids=[name for name, _ in ANY])
def test_any_optimizer_is_torchs_bit_for_bit(name: str, arguments: dict[str, Any]) -> None:
    kind = getattr(torch.optim, name)
    expected = plain(lambda parameters: kind(parameters, foreach=False, **arguments))
    assert_same_bits(train(manifest("torch_optimizer", {"name": name, "arguments": arguments})), expected)


@pytest.mark.parametrize(
    ("name", "options", "kind", "arguments"),
    [
        ("adamw", ADAMW[1], torch.optim.AdamW, {"foreach": False}),
        ("sgd", SGD[2], torch.optim.SGD, {"foreach": False}),
        ("torch_optimizer", {"name": "NAdam"}, torch.optim.NAdam, {"foreach": False}),
    ],
)
def test_float64_agrees_with_the_unfused_class(
    name: str, options: dict[str, Any], kind: Any, arguments: dict[str, Any]
) -> None:
    own = options if name != "torch_optimizer" else {}
    expected = plain(lambda parameters: kind(parameters, **arguments, **own), torch.float64)
    assert distance(train(manifest(name, options), torch.float64), expected) < 1e-12


def clipped(parameters: list[nn.Parameter], limit: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1, fused=True)
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(parameters, limit))
    return optimizer


def test_clip_value_clamps_each_element() -> None:
    found = train(manifest("sgd", {"lr": 0.1}, clip_value=1e-3))
    assert distance(found, plain(lambda parameters: clipped(parameters, 1e-3))) < 1e-6


@pytest.mark.parametrize(("name", "options"), [("sgd", SGD[1]), ("torch_optimizer", {"name": "RMSprop"})])
def test_clip_norm_scales_all_gradients(name: str, options: dict[str, Any]) -> None:
    kind, own = (torch.optim.SGD, options) if name == "sgd" else (torch.optim.RMSprop, {})
    expected = plain(lambda parameters: kind(parameters, **own), torch.float64, clip_norm=0.2)
    assert distance(train(manifest(name, options, clip_norm=0.2), torch.float64), expected) < 1e-12


RULES = [
    ("adamw", ADAMW[2]),
    ("sgd", SGD[1]),
    ("torch_optimizer", {"name": "NAdam"}),
    ("torch_optimizer", {"name": f"{__name__}:Counted"}),
]


@pytest.mark.parametrize(("name", "options"), RULES)
def test_a_skipped_step_leaves_weights_and_states(name: str, options: dict[str, Any]) -> None:
    """The first step too: what is tried before it must not count as a first update."""
    settings = manifest(name, options)
    expected = train(settings)
    assert_same_bits(train(settings, broken=0), expected)
    assert_same_bits(train(settings, broken=3), expected)


def on_rank(settings: Mapping[str, Any]) -> dict[str, Tensor]:
    return train(settings, torch.float64, torch.distributed.get_rank())


@pytest.mark.parametrize(
    ("name", "options", "make"),
    [
        ("adamw", ADAMW[1], lambda parameters: torch.optim.AdamW(parameters, **ADAMW[1])),
        ("sgd", SGD[1], lambda parameters: torch.optim.SGD(parameters, **SGD[1])),
        ("torch_optimizer", {"name": "RMSprop"}, torch.optim.RMSprop),
    ],
)
def test_ranks_train_like_one_process(ranks: Any, name: str, options: dict[str, Any], make: Make) -> None:
    expected = plain(make, torch.float64, world=2)
    for found in ranks.run(on_rank, manifest(name, options), world=2):
        assert distance(found, expected) < 1e-9


class Counted(torch.optim.Optimizer):
    """Momentum whose state is a Python number and tensors that are replaced, not changed, at each step."""

    def __init__(self, params: Any, lr: float = 0.1, weights: tuple[float, ...] = (0.9, 0.5)) -> None:
        super().__init__(params, {"lr": lr, "weights": list(weights)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        old = state.get("mean", torch.zeros_like(parameter))
        state["updates"] = state.get("updates", 0) + 1
        state["mean"] = old * group["weights"][0] + parameter.grad * group["weights"][1]
        parameter.sub_(state["mean"], alpha=group["lr"] / state["updates"])


class Early(Counted):
    """Makes its states in the constructor, from the parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {"mean": parameter.detach().clone()}

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        mean = self.state[parameter]["mean"].mul_(0.9).add_(parameter.grad)
        parameter.sub_(mean, alpha=group["lr"])


class Restless(Counted):
    """Counts its steps in its group, for all parameters together."""

    def step(self, closure: Any = None) -> None:
        super().step()
        self.param_groups[0]["k"] = self.param_groups[0].get("k", 0) + 1


class Normed(Counted):
    """Divides by the norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        everything = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in everything]).norm()
        for parameter in everything:
            parameter.sub_(parameter.grad / norm)


class Wide(Counted):
    """Keeps a state twice as long as the parameter."""

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        self.state[parameter]["pair"] = torch.cat([parameter.flatten(), parameter.grad.flatten()])


@pytest.mark.parametrize("kind", [Counted, Early])
def test_an_optimizer_of_ones_own_may_keep_its_states_in_its_own_way(kind: Any) -> None:
    settings = manifest("torch_optimizer", {"name": f"{__name__}:{kind.__name__}", "arguments": {"lr": 0.05}})
    assert_same_bits(train(settings), plain(lambda parameters: kind(parameters, lr=0.05)))


def refused(settings: Mapping[str, Any]) -> str:
    with pytest.raises(DsxError) as caught:
        dsx.prepare(nn.Linear(2, 2), settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Adafactor", ["is not elementwise: its update mixes elements of a parameter"]),
        ("Muon", ["cannot be made", "2D parameters"]),
        ("LBFGS", ["cannot update a vector", "closure"]),
        ("SparseAdam", ["cannot update a vector", "dense gradients"]),
        (f"{__name__}:Normed", ["mixes elements"]),
        (f"{__name__}:Restless", ["keeps numbers outside the state of a parameter: k"]),
        (f"{__name__}:Wide", ["keeps a state 'pair'", "a tensor [16]"]),
    ],
)
def test_what_is_not_elementwise_is_refused(name: str, words: list[str]) -> None:
    text = refused(manifest("torch_optimizer", {"name": name}))
    assert text.startswith(f"torch_optimizer cannot run '{name}': it ")
    assert "where: [optimize.torch_optimizer] name" in text
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "RMSProp"}, ["torch.optim has no optimizer 'RMSProp'", "did you mean 'RMSprop'?"]),
        ({"name": "no_such_module:Lion"}, ["there is no optimizer", "No module named 'no_such_module'"]),
        ({"name": ":Lion"}, ["there is no optimizer ':Lion'"]),
        ({"name": "torch.nn:Linear"}, ["'torch.nn:Linear' is no optimizer"]),
        (
            {"name": "RMSprop", "arguments": {"momentun": 0.9}},
            [
                "'RMSprop' has no argument 'momentun'",
                "[optimize.torch_optimizer.arguments]",
                "did you mean 'momentum'?",
            ],
        ),
        ({"name": "RMSprop", "arguments": {"lr": -1.0}}, ["Invalid learning rate: -1.0", "change its arguments"]),
    ],
)
def test_wrong_names_and_arguments_are_named(options: dict[str, Any], words: list[str]) -> None:
    text = refused(manifest("torch_optimizer", options))
    assert all(word in text for word in words), text


@pytest.mark.parametrize("options", [{"nesterov": True}, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}])
def test_nesterov_without_its_momentum_is_refused_in_words(options: dict[str, Any]) -> None:
    text = refused(manifest("sgd", options))
    assert "optimize.sgd: nesterov = true needs momentum above 0 and dampening 0" in text


@pytest.mark.parametrize(
    ("name", "options", "key"),
    [
        ("adamw", {"betas": [0.9, 1.0]}, "optimize.adamw.betas[1]"),
        ("adamw", {"lr": -1e-3}, "optimize.adamw.lr"),
        ("sgd", {"momentum": -0.1}, "optimize.sgd.momentum"),
    ],
)
def test_options_out_of_range_are_named(name: str, options: dict[str, Any], key: str) -> None:
    with pytest.raises(ManifestError) as caught:
        dsx.prepare(nn.Linear(2, 2), manifest(name, options))
    assert [problem.key for problem in caught.value.problems] == [key]


def test_states_are_those_that_the_options_need() -> None:
    def held(name: str, options: dict[str, Any]) -> set[str]:
        engine = dsx.prepare(nn.Linear(2, 2), manifest(name, options))
        return set(engine.program.store.bytes())

    assert held("sgd", {}) == set()
    assert held("sgd", {"momentum": 0.9}) == {"momentum_buffer"}
    assert held("adamw", {"amsgrad": True}) == {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}
    assert held("torch_optimizer", {"name": "NAdam"}) == {"step", "mu_product", "exp_avg", "exp_avg_sq"}


class Heavy(Groups):
    def hypers(self, base: Hyper) -> Mapping[str, Hyper]:
        return {"plain": base, "heavy": base.replace(momentum=0.9)}


def test_a_group_with_momentum_needs_buffers() -> None:
    options = sgd.Options()
    (part,) = sgd.dsx_optimize(options)
    plan = SimpleNamespace(device=torch.device("cpu"))
    context = Context(plan=plan, model=nn.Linear(2, 2), flatten=list, parts={"groups": Heavy()})  # type: ignore[arg-type]
    assert part.bind is not None
    with pytest.raises(DsxError, match=r"the group 'heavy' has momentum 0\.9, but sgd itself has none"):
        part.bind(part.build(context), context)
