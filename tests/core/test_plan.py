"""A run on paper against the same run for real: bytes held and sent are equal, not near."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn

import dsx
from dsx.cli.plan import command
from dsx.errors import CapabilityMissing, DsxError
from dsx.manifest import Manifest
from dsx.plan.forecast import Forecast
from dsx.plan.ledger import Ledger
from dsx.plan.search import fits
from dsx.plan.subject import Subject
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.registry import Registry
from dsx.testing import CountingPlugin
from dsx.testing.models import Tangle, tokens

LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
META = torch.device("meta")


def manifest(layout: str, bf16: bool = False, accumulation: int = 1, **sections: Any) -> dict[str, Any]:
    return {
        "batch": {"accumulation": accumulation},
        "partition": {"use": [] if layout == "replicated" else [layout]},
        "precision": {"use": ["bf16"] if bf16 else []},
        "optimize": {"use": ["adamw"]},
        **sections,
    }


def trained(settings: dict[str, Any]) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """What this rank holds after two updates, and what it sent in the second."""
    use = {**settings, "communicate": {"use": ["counting"]}}
    engine = dsx.prepare(Tangle(width=64), use, plugins={"counting": CountingPlugin()})
    counting: Any = engine.program.transport
    for update in range(2):
        counting.reset()
        engine.train_step([tokens(update, micro, dist.get_rank()) for micro in range(engine.accumulation)])
    layout = dict(engine.program.layout.bytes())
    buffer = layout.pop("buffer", 0)
    held = {f"device {name}": size for name, size in layout.items()}
    for (place, name), size in engine.program.store.places().items():
        held[f"{place} {name}"] = held.get(f"{place} {name}", 0) + size
    return held, {"buffer": buffer}, dict(counting.bytes)


def on_paper(settings: dict[str, Any], world: int) -> Forecast:
    return dsx.forecast(Tangle(width=64), settings, batch=tokens(0, 0, 0), world=world)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("bf16", "accumulation", "world"),
    [(False, 1, 1), (False, 1, 2), (False, 1, 4), (True, 1, 2), (True, 3, 1), (True, 3, 4)],
)
def test_states_and_traffic_are_those_of_the_run(ranks, layout, bf16, accumulation, world) -> None:
    settings = manifest(layout, bf16, accumulation)
    found = on_paper(settings, world).rehearsal
    for rank, (held, buffer, sent) in enumerate(ranks.run(trained, settings, world=world)):
        assert {f"{place} {name}": size for (place, name), size in found.states.items()} == held
        assert sum(found.buffers.values()) == buffer["buffer"]
        if rank == 0:
            assert dict(found.work.sent) == sent


@pytest.mark.parametrize(("layout", "gigabytes"), list(zip(LAYOUTS, (120.0, 31.4, 16.6, 1.9), strict=True)))
def test_the_zero_paper_s_example(layout: str, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, arXiv 1910.02054, figure 1: 7.5 B parameters on 64 ranks, in 16 bits with Adam."""
    found = dsx.forecast(7_500_000_000, manifest(layout, bf16=True), world=64).rehearsal
    assert round(sum(found.states.values()) / 1e9, 1) == gigabytes


def test_a_thousand_ranks_are_planned_like_two() -> None:
    few = dsx.forecast(1_000_000_000, manifest("zero3", bf16=True), world=2).rehearsal
    many = dsx.forecast(1_000_000_000, manifest("zero3", bf16=True), world=1024).rehearsal
    assert sum(few.states.values()) == pytest.approx(8e9, rel=1e-3)
    assert sum(many.states.values()) == pytest.approx(16e9 / 1024, rel=1e-2)
    assert many.work.sent["gather"] == pytest.approx(2 * few.work.sent["gather"], rel=1e-2)


class Layers(nn.Module):
    """Of a known memory: what backward needs is each layer's input, and the last output."""

    def __init__(self, width: int = 96, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        return inputs.square().mean()


def test_activations_are_what_backward_needs() -> None:
    rows, width, layers = 1000, 96, 4
    found = dsx.forecast(Layers(width, layers), {}, batch=torch.empty(rows, width)).rehearsal
    tensor = rows * width * 4
    # Outputs of all layers are kept. The worst instant is the backward of the square: the gradient of the mean, and the
    # three tensors that torch makes of it one after another, grad * (2 * output ** 1).
    assert found.peak["device", "activations"] == pytest.approx((layers + 4) * tensor, abs=100)
    products = 2 * rows * width * width
    assert found.work.flops == {"float32": products * (3 * layers - 1)}, "no gradient of the batch"


def test_more_micro_batches_cost_work_and_no_activations() -> None:
    one, five = (
        dsx.forecast(Layers(), manifest("zero2", accumulation=k), batch=torch.empty(50, 96), world=2).rehearsal
        for k in (1, 5)
    )
    assert five.work.flops["float32"] == 5 * one.work.flops["float32"]
    assert five.work.sent["reduce"] == 5 * one.work.sent["reduce"]
    assert five.work.sent["publish"] == one.work.sent["publish"]
    assert five.work.updated == pytest.approx(one.work.updated, rel=0.05)


def test_a_model_is_not_changed_and_values_are_not_needed() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.mask = torch.tril(torch.ones(4, 8))  # no buffer: it has values, beside parameters without

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if inputs.abs().max() > 0 and inputs.sum().item() > 0:
                inputs = self.linear(inputs) * self.mask
            return inputs.mean()

    model = Gated()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = dsx.forecast(model, {}, batch=torch.ones(4, 8))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert any("values" in note for note in found.notes)


def test_a_function_is_called_without_memory() -> None:
    made: list[nn.Module] = []

    def huge() -> nn.Module:
        made.append(nn.Linear(1_000_000, 1_000_000, bias=False))  # 4 TB
        return made[-1]

    found = dsx.forecast(huge, manifest("zero3"), world=1024)
    assert found.parameters == 10**12 and all(p.is_meta for model in made for p in model.parameters())
    assert any("activations" in note for note in found.notes)


class Needy:
    """Wants what a layout that shards gradients does not offer."""

    descriptor = Descriptor(
        name="needy", section="communicate", contract=1, fills={"wrappers": Fill(needs=["gradients.local"])}
    )

    @hook
    def dsx_communicate(self) -> list[Part]:
        return []


def test_a_run_that_cannot_be_is_refused_as_a_run_is() -> None:
    settings = manifest("zero2", communicate={"use": ["needy"]})
    with pytest.raises(CapabilityMissing, match=r"'needy' needs 'gradients\.local'"):
        dsx.forecast(1000, settings, plugins={"needy": Needy()})


def test_the_fewest_ranks_are_found() -> None:
    def subject(world: int) -> Subject:
        return Subject(lambda: Layers(64, 8).to(META), None)

    settings = Manifest.of({"optimize": {"use": ["adamw"]}})
    whole = 16 * sum(parameter.numel() for parameter in Layers(64, 8).parameters())
    limit = round(0.42 * whole)
    found = {
        fit.layout: fit
        for fit in fits(settings, Registry.scan(), subject, lambda each: sum(each.states.values()) <= limit)
    }
    assert found[None].found is None and found[None].tried == 1024
    assert found["zero1"].found is None, "it keeps parameters and gradients: 0.5"
    assert found["zero2"].found is not None and found["zero2"].found.world == 5, "0.25 + 0.75 / 5, and 4 would be 0.44"
    assert found["zero3"].found is not None and found["zero3"].found.world == 3


def test_what_is_held_is_counted_as_long_as_it_lives() -> None:
    with Ledger() as ledger:
        first = torch.empty(1000, device=META)
        view = first[:10]
        assert ledger.live == 4000
        del first
        assert ledger.live == 4000, "the view keeps it"
        second = view.repeat(50)
        assert ledger.live == 6000
        del view
        assert (ledger.live, ledger.peak) == (2000, 6000)
        ledger.follow([second])
        second.untyped_storage().resize_(0)
        assert ledger.live == 0
    assert ledger.moved[""] == 10 * 4 + 500 * 4 + 4000, "repeat reads and writes, empty has made its memory"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        """
        [run]
        name = "small"
        [batch]
        global = 16
        [model]
        factory = "dsx_text:gpt"
        layers = 2
        width = 32
        heads = 2
        context = 16
        [optimize]
        use = ["adamw"]
        """
    )
    return path


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_tells_people(file, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = invoke(file, "--world", 4, "--set", "partition.use=['zero2']", "--device", "cpu")
    assert text.startswith("small: ") and "4 rank(s)" in text
    for words in ("exp_avg", "grad", "at the worst instant", "sent for reduce", "a rank's process", "[data]"):
        assert words in text, words
    assert "not measured yet; run `dsx doctor --profile`" in text


def test_the_command_tells_scripts_and_finds_what_fits(file) -> None:
    arguments = ("--parameters", "1e9", "--device-memory", "6GB", "--json", "--device", "cpu")
    found = json.loads(invoke(file, *arguments))
    assert found["parameters"] == 10**9
    assert sum(found["states"]["device"].values()) == pytest.approx(16e9, rel=1e-3)
    fitting = {fit["layout"]: fit["found"] and fit["found"]["world"] for fit in found["fits"]}
    assert fitting[None] is None and fitting["zero1"] is None
    assert fitting["zero3"] == 4, "16 / 4 GB and a unit's buffers; 3 ranks do not divide a batch of 16"


@pytest.mark.parametrize("size", ["80 bananas", "GB", "1e"])
def test_a_size_that_is_none_is_refused(file, size: str) -> None:
    done = CliRunner().invoke(command, [str(file), "--parameters", size])
    assert done.exit_code == 2 and f"'{size}' is no size" in done.output


def test_a_manifest_without_a_model_says_what_to_give(tmp_path) -> None:
    path = tmp_path / "script.toml"
    path.write_text("[optimize]\nuse = ['adamw']\n")
    with pytest.raises(DsxError, match="names no model") as caught:
        CliRunner().invoke(command, [str(path)], catch_exceptions=False)
    assert "--parameters" in str(caught.value)


@pytest.mark.parametrize(
    "optimize",
    [
        {"use": ["adamw"]},
        {"use": ["adamw"], "adamw": {"amsgrad": True}},
        {"use": ["sgd"], "sgd": {"lr": 0.1, "momentum": 0.9}},
        {"use": ["torch_optimizer"], "torch_optimizer": {"name": "RMSprop", "arguments": {"momentum": 0.9}}},
        {"use": ["torch_optimizer"], "torch_optimizer": {"name": "Adagrad"}},
    ],
    ids=lambda table: "-".join([*table["use"], *map(str, table.get(table["use"][0], {}).values())]),
)
@pytest.mark.parametrize("bf16", [False, True])
def test_every_optimizer_can_be_planned(ranks, optimize: dict[str, Any], bf16: bool) -> None:
    settings = manifest("zero1", bf16, optimize=optimize)
    found = on_paper(settings, 2).rehearsal
    for held, _, _ in ranks.run(trained, settings, world=2):
        assert {f"{place} {name}": size for (place, name), size in found.states.items()} == held


@pytest.mark.parametrize("layout", ["replicated", "zero3"])
def test_autocast_can_be_planned(ranks, layout: str) -> None:
    """torch.autocast does not know the meta device."""
    settings = manifest(layout, precision={"use": ["autocast"]})
    found = on_paper(settings, 2).rehearsal
    for rank, (held, _, sent) in enumerate(ranks.run(trained, settings, world=2)):
        assert {f"{place} {name}": size for (place, name), size in found.states.items()} == held
        if rank == 0:
            assert dict(found.work.sent) == sent
    narrow, wide = found.work.flops["bfloat16"], found.work.flops.get("float32", 0)
    assert narrow > 0 == wide


def test_an_operation_without_sizes_is_named() -> None:
    library = torch.library.Library("dsx_test_plan", "DEF")
    try:
        library.define("mystery(Tensor a) -> Tensor")
        library.impl("mystery", lambda a: a.clone(), "CPU")

        class Odd(nn.Linear):
            def forward(self, inputs: torch.Tensor) -> torch.Tensor:
                return super().forward(torch.ops.dsx_test_plan.mystery(inputs)).mean()

        with pytest.raises(DsxError, match="dsx_test_plan::mystery cannot be made on paper"):
            dsx.forecast(Odd(4, 4), {}, batch=torch.ones(2, 4))
    finally:
        library._destroy()
