"""Models built by `dsx.empty_init`, and weights read from files, under every layout."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import dsx
from dsx.errors import DsxError, RankMismatch
from dsx.testing import Ranks, distance, weights_of
from dsx.testing.models import Tangle, tokens
from dsx_text import gpt
from parity import LAYOUTS, prepare
from zoo import KINDS


def trained(model: nn.Module, layout: str, batch: Callable[[int], Mapping[str, Tensor]]) -> list[Any]:
    """Weights and buffers at the start, losses of 3 steps, and what it came to."""
    engine = prepare(model, layout)
    seen: list[Any] = [weights_of(engine), buffers(model)]
    for step in range(3):
        engine.backward(engine(**batch(step)))
        seen.append(engine.step().loss)
    seen += [weights_of(engine), buffers(model)]
    engine.close()
    return seen


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return bool(one == other)


def empty_like_real(layout: str, kind: str) -> list[bool]:
    """Whether all that `trained` saw is the same for a model that was built for real."""
    rank, made = dist.get_rank(), KINDS[kind]
    outcomes = []
    for empty in (False, True):
        if empty:
            with dsx.empty_init():
                model = made.make()
        else:
            model = made.make()
        outcomes.append(trained(model, layout, lambda step: made.batch(step, 0, rank)))
        assert all(not tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return [equal(*both) for both in zip(*outcomes, strict=True)]


@pytest.mark.parametrize("kind", ["sequences", "convolution", "t5"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_as_a_model_that_was_built_for_real(ranks: Ranks, layout: str, world: int, kind: str) -> None:
    for found in ranks.run(empty_like_real, layout, kind, world=world):
        assert found == [True] * 7


def seeded_by_rank(layout: str) -> tuple[dict[str, Tensor], bool]:
    with dsx.empty_init():
        model = Tangle(seed=dist.get_rank())
    engine = prepare(model, layout)
    weights = weights_of(engine)
    engine.backward(engine(*tokens(0, 0, 0)))
    engine.step()
    engine.close()
    return weights, model.head.weight is model.embedding.weight


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rank_0_decides_where_ranks_were_built_differently(ranks: Ranks, layout: str) -> None:
    """Cases 39 and 91."""
    expected = weights_of(Tangle(seed=0))
    for weights, tied in ranks.run(seeded_by_rank, layout, world=3):
        assert equal(weights, expected) and tied


def uninitialised(layout: str) -> dict[str, Tensor]:
    with dsx.empty_init():
        model = nn.Linear(40, 30)
        model.weight = nn.Parameter(torch.empty(30, 40))
    return weights_of(prepare(model, layout))


@pytest.mark.parametrize("layout", ["replicated", "zero3"])
def test_what_nobody_writes_is_zero_on_all_ranks(ranks: Ranks, layout: str) -> None:
    for weights in ranks.run(uninitialised, layout):
        assert not weights["weight"].any() and weights["bias"].any()


def half_empty() -> None:
    if dist.get_rank() == 0:
        with dsx.empty_init():
            model = nn.Linear(3, 3)
    else:
        model = nn.Linear(3, 3)
    dsx.prepare(model)


def test_ranks_build_alike(ranks: Ranks) -> None:
    for error in ranks.errors(half_empty):
        assert isinstance(error, RankMismatch)
        assert "the ranks do not have the same source of weights" in str(error)
        assert "build it within dsx.empty_init() or on none" in str(error)


def saved(folder: Path, model: nn.Module, files: int = 1, dtype: torch.dtype | None = None) -> Path:
    """The model's weights and buffers, as Hugging Face lays them out; tied ones once."""
    tensors = {name: tensor.detach().to(dtype or tensor.dtype) for name, tensor in named(model)}
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder / "model.safetensors"
    homes = {name: f"model-{number % files}.safetensors" for number, name in enumerate(tensors)}
    for file in set(homes.values()):
        save_file({name: tensor for name, tensor in tensors.items() if homes[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    return folder


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def from_files(layout: str, path: str, how: str) -> list[Any]:
    if how == "empty":
        with dsx.empty_init():
            model: nn.Module = Tangle(seed=dist.get_rank() + 9)
    elif how == "real":
        model = Tangle(seed=dist.get_rank() + 9)
    else:
        with torch.device("meta"):
            model = Tangle()
        assert model.head.weight.is_meta
    engine = prepare_from(model, layout, path)
    before, rest = weights_of(engine), buffers(model)
    for step in range(2):
        engine.backward(engine(*tokens(step, 0, dist.get_rank())))
        engine.step()
    engine.close()
    return [before, rest, model.head.weight is model.embedding.weight]


@pytest.mark.parametrize(("how", "files"), [("empty", 3), ("real", 1), ("meta", 3)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_read_from_files(ranks: Ranks, tmp_path: Path, layout: str, files: int, how: str) -> None:
    model = Tangle(seed=4)
    path = saved(tmp_path, model, files)
    for weights, rest, tied in ranks.run(from_files, layout, str(path), how):
        assert equal(weights, weights_of(model)) and equal(rest, buffers(model)) and tied


def other_files(layout: str, folder: str) -> dict[str, Tensor]:
    return weights_of(prepare_from(nn.Linear(40, 30), layout, f"{folder}/{dist.get_rank()}/model.safetensors"))


def prepare_from(model: nn.Module, layout: str, weights: str | Path) -> dsx.Engine:
    partition = {} if layout == "replicated" else {"partition": {"use": [layout]}}
    return dsx.prepare(model, partition, weights=weights)


@pytest.mark.parametrize("layout", ["replicated", "zero3"])
def test_rank_0_decides_where_ranks_have_other_files(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    models = [nn.Linear(40, 30) for _ in range(2)]
    for rank, model in enumerate(models):
        (tmp_path / str(rank)).mkdir()
        saved(tmp_path / str(rank), model)
    for weights in ranks.run(other_files, layout, str(tmp_path)):
        assert equal(weights, weights_of(models[0]))


def test_weights_take_the_dtype_of_the_model(tmp_path: Path) -> None:
    model = Tangle(seed=4)
    path = saved(tmp_path, model, dtype=torch.bfloat16)
    found = weights_of(prepare_from(Tangle(), "replicated", path))
    assert equal(found, {name: weight.bfloat16().float() for name, weight in weights_of(model).items()})


def test_a_folder_with_one_file_and_other_names_of_ties(tmp_path: Path) -> None:
    model = Tangle(seed=4)
    tensors = {name: tensor.detach().clone() for name, tensor in named(model)}
    tensors["head.weight"] = tensors.pop("embedding.weight")
    for metadata in ({"embedding.weight": "head.weight"}, {"tied": json.dumps({"embedding.weight": "head.weight"})}):
        save_file(tensors, tmp_path / "any.safetensors", {"format": "pt", **metadata})
        for make in (Tangle, untied):
            found = weights_of(prepare_from(make(), "replicated", tmp_path))
            assert distance(found, weights_of(loaded(make(), model))) == 0


def untied() -> nn.Module:
    model = Tangle()
    model.head.weight = nn.Parameter(model.embedding.weight.detach().clone())
    return model


def loaded(model: nn.Module, source: nn.Module) -> nn.Module:
    model.load_state_dict(source.state_dict())
    return model


def refused(model: nn.Module, path: Path) -> str:
    with pytest.raises(DsxError) as caught:
        dsx.prepare(model, weights=path)
    return str(caught.value)


def test_all_misfits_are_listed_at_once(tmp_path: Path) -> None:
    model = Tangle()
    tensors = {name: tensor.detach().clone() for name, tensor in named(model)}
    tensors["block.0.norm.weight"] = tensors.pop("blocks.0.norm.weight")
    tensors["rows"] = torch.zeros(17)
    save_file(tensors, tmp_path / "model.safetensors")
    text = refused(model, tmp_path / "model.safetensors")
    assert "the weights do not fit the model" in text and f"where: {tmp_path}/model.safetensors" in text
    assert "missing: blocks.0.norm.weight (is it 'block.0.norm.weight'?)" in text
    assert "unexpected: block.0.norm.weight" in text and "misshapen: rows is [17], not [1, 17]" in text


def test_ties_that_the_files_contradict_are_named(tmp_path: Path) -> None:
    tensors = {name: tensor.detach().clone() for name, tensor in named(Tangle())}
    save_file({**tensors, "head.weight": tensors["embedding.weight"] + 1}, tmp_path / "model.safetensors")
    text = refused(Tangle(), tmp_path / "model.safetensors")
    assert "'embedding.weight' and 'head.weight' are one parameter in the model, and differ in the weights" in text


def test_buffers_that_are_in_no_file_are_named(tmp_path: Path) -> None:
    save_file({"0.weight": torch.ones(3, 2), "0.bias": torch.ones(3)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3))
        model.register_buffer("table", torch.ones(3), persistent=False)
    text = refused(model, tmp_path)
    assert "1 tensors of the model are on the meta device" in text and "found: table" in text


def test_files_that_are_not_there_or_no_weights(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    assert "there are no weights to start from" in refused(model, tmp_path / "lost")
    (tmp_path / "a.safetensors").write_bytes(b"no")
    assert "the weights cannot be read" in refused(model, tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"no")
    text = refused(model, tmp_path)
    assert "it is not clear which file has the weights" in text and "found: a.safetensors, b.safetensors" in text
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "the index of the weights cannot be read" in refused(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "lost.safetensors"}}')
    assert "lost.safetensors" in refused(model, tmp_path)


def large() -> nn.Module:
    return gpt(vocab=16384, layers=10, width=768, heads=12)


def memory(weights: str | None) -> tuple[int, int, int, int]:
    """Bytes: at the worst instant until training can begin, of states, of the largest two units, of parameters."""
    warm_up = prepare(gpt(layers=1, width=16), "zero3")
    warm_up.close()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with dsx.empty_init():
        model = large()
    engine = prepare_from(model, "zero3", weights) if weights else prepare(model, "zero3")
    peak = resident("VmHWM") - before
    program = engine.program
    states = sum(program.store.bytes().values()) + sum(program.layout.bytes().values())
    units = sorted(sum(flat.size * flat.source.itemsize for flat in unit.flats) for unit in program.layout.units)
    engine.close()
    return peak, states, sum(units[-2:]), sum(parameter.numel() * 4 for parameter in model.parameters())


def resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("source", ["constructor", "file"])
def test_a_rank_never_holds_the_model(tmp_path: Path, source: str) -> None:
    """At most its states, two units and 10 %, from the constructor's start on; the states are half of the whole."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process's memory is read from /proc")
    weights = str(saved(tmp_path, large())) if source == "file" else None
    with Ranks(2) as own:
        for peak, states, units, whole in own.run(memory, weights, timeout=120):
            assert whole > 320e6 and states == pytest.approx(2 * whole, rel=0.01)
            assert peak < 1.1 * states + units
