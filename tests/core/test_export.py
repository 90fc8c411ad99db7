"""Export: the same safetensors files whatever the layout, written in pieces, whole or not at all."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import dsx
from dsx.checkpoint.archive import Archive
from dsx.checkpoint.info import INFO, canonical, digest
from dsx.cli import call
from dsx.errors import CheckpointError, RankMismatch
from dsx.testing import weights_of
from dsx.testing.models import Tangle, tokens
from dsx.weights.header import Spec, header
from dsx.weights.live import export_engine
from dsx.weights.writer import File, Files, split
from parity import LAYOUTS, Net, prepare, sample

DTYPES = (
    *("bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "int16", "uint16", "float16", "bfloat16"),
    *("int32", "uint32", "float32", "complex64", "float64", "int64", "uint64"),
)


def of_every_dtype() -> dict[str, Tensor]:
    """Odd sizes, 0-dim and empty ones."""
    found = {}
    for number, name in enumerate(DTYPES):
        dtype = getattr(torch, name)
        for place, shape in enumerate(((3, 5), (), (0, 2), (1, number + 1))):
            found[f"{'zyx'[number % 3]}.{name}.{place}"] = torch.randint(0, 2, shape).to(dtype)
    return found


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """In pieces of 4 elements, tensors in another order than in the file."""
    file = File(path, [Spec(name, tuple(t.shape), t.dtype) for name, t in tensors.items()], metadata)
    for name, tensor in random.Random(0).sample(list(tensors.items()), len(tensors)):
        flat = tensor.reshape(-1)
        for start in range(0, flat.numel(), 4):
            file.write(name, start, flat[start : start + 4])
    assert file.whole


def test_a_file_has_the_bytes_that_the_library_writes(tmp_path: Path) -> None:
    tensors = of_every_dtype()
    write(tmp_path / "ours", tensors, {"format": "pt"})
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_metadata_is_in_a_fixed_order() -> None:
    specs = [Spec("a", (2,), torch.float32)]
    one, other = (dict.fromkeys(names, "x") for names in ("abcdef", "fedcba"))
    assert header(specs, one) == header(specs, other)


def test_a_dtype_that_the_format_lacks_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"'a' is torch.complex128, which safetensors does not have"):
        header([Spec("a", (2,), torch.complex128)], {})


def test_shards_are_cut_as_hugging_face_does() -> None:
    cutter = pytest.importorskip("huggingface_hub.serialization")
    draw = random.Random(1)
    for limit in (1, 40, 100, 1000, 10**6):
        specs = [Spec(f"t{i}", (draw.randint(0, 60),), torch.float32) for i in range(draw.randint(1, 40))]
        tensors = {spec.name: torch.empty(spec.shape) for spec in specs}
        expected = cutter.split_torch_state_dict_into_shards(tensors, max_shard_size=limit).filename_to_tensors
        assert {name: [spec.name for spec in part] for name, part in split(specs, limit).items()} == expected


def test_values_that_did_not_come_are_an_error(tmp_path: Path) -> None:
    files = Files(tmp_path, [Spec("a", (2,), torch.float32), Spec("b", (2,), torch.float32)], {}, 8)
    files.write("a", 0, torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"not all values of model-00002-of-00002.safetensors came"):
        files.finish()


def train(make: Callable[[], nn.Module], layout: str, folder: str, data: Callable[[int], Any]) -> dict[str, Tensor]:
    """Two updates, a checkpoint, and exports of the live engine; the weights."""
    engine = prepare(make(), layout)
    for step in range(2):
        engine.train_step([data(step)])
    engine.save(f"{folder}/checkpoint")
    for _ in range(2):
        engine.export(f"{folder}/live", overwrite=True)
    engine.export(f"{folder}/live-bf16", dtype="bfloat16", shard_bytes=200)
    return weights_of(engine)


def words(step: int) -> Any:
    return tokens(step, 0, dist.get_rank())


def vectors(step: int) -> Any:
    return sample(step, 0, dist.get_rank())


class Mixed(Net):
    """fp32 and fp64, frozen bf16 and integers, buffers that are saved and that are not, one of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].float()
        self.blocks[1].bfloat16().requires_grad_(False)
        self.codes = nn.Parameter(torch.arange(7, dtype=torch.int16), requires_grad=False)
        self.register_buffer("mean", torch.linspace(0, 1, 6).view(2, 3).t())
        self.register_buffer("also", self.mean)
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden.to(block.weight.dtype)))
        return nn.functional.cross_entropy(self.head(hidden.to(self.head.weight.dtype)), classes)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_export_of_any_layout_loads_and_is_equal_cases_21_37_38(ranks, tmp_path: Path, layout: str) -> None:
    """Odd shapes; tied weights are there once, and equal under both names."""
    expected = ranks.run(train, Tangle, layout, str(tmp_path), words, world=2)[0]
    found = dsx.export(tmp_path / "checkpoint", tmp_path / "out")
    assert (found.files, found.tensors) == (("model.safetensors",), len(expected) + 1)
    model = Tangle(seed=3)
    load_model(model, tmp_path / "out" / "model.safetensors")
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert torch.equal(parameter, expected["embedding.weight" if name == "head.weight" else name]), name
    assert torch.equal(model.offset, Tangle().offset)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    assert contents(tmp_path / "out") == contents(tmp_path / "live")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dtypes_are_kept_or_cast_case_41(ranks, tmp_path: Path, layout: str) -> None:
    expected = ranks.run(train, Mixed, layout, str(tmp_path), vectors, world=3)[0]
    expected |= {name: tensor for name, tensor in Mixed().state_dict().items() if name in ("mean", "count")}
    dsx.export(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    Mixed().load_state_dict({**found, "also": found["mean"]})
    dsx.export(tmp_path / "checkpoint", tmp_path / "cast", torch.bfloat16, shard_bytes=200)
    index = json.loads((tmp_path / "cast" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    cast = {}
    for file in set(index["weight_map"].values()):
        cast |= load_file(tmp_path / "cast" / file)
    assert {name: index["weight_map"][name] for name in cast} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in cast.values())
    for name, tensor in cast.items():
        right = expected[name]
        assert torch.equal(tensor, right.bfloat16() if right.is_floating_point() else right), name
    assert contents(tmp_path / "cast") == contents(tmp_path / "live-bf16")


def reload(layout: str, path: str, out: str) -> None:
    engine = prepare(Tangle(seed=4), layout)
    engine.load(path)
    engine.save(out)


def test_the_same_weights_are_the_same_files(ranks, tmp_path: Path) -> None:
    """Whatever the layout and the world size of the checkpoint."""
    ranks.run(train, Tangle, "zero2", str(tmp_path), words, world=2)
    dsx.export(tmp_path / "checkpoint", tmp_path / "first", shard_bytes=2000)
    assert len(contents(tmp_path / "first")) > 3
    for layout, world in (("zero3", 3), ("replicated", 1), ("zero1", 4)):
        ranks.run(reload, layout, str(tmp_path / "checkpoint"), str(tmp_path / layout), world=world)
        dsx.export(tmp_path / layout, tmp_path / f"{layout}-out", shard_bytes=2000)
        assert contents(tmp_path / f"{layout}-out") == contents(tmp_path / "first")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    engine = dsx.prepare(Tangle())
    engine.train_step([tokens(0, 0, 0)])
    engine.save(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("piece_bytes", [4, 100, 1 << 20])
def test_a_tensor_is_read_in_pieces_of_any_size(ranks, tmp_path: Path, piece_bytes: int) -> None:
    expected = ranks.run(train, Tangle, "zero3", str(tmp_path), words, world=3)[0]
    archive = Archive(tmp_path / "checkpoint", piece_bytes)
    for name, tensor in expected.items():
        found = torch.full_like(tensor, torch.nan).view(-1)
        for start, piece in archive.read(f"weight/{name}"):
            assert piece.nbytes <= piece_bytes
            found[start : start + piece.numel()] = piece
        assert torch.equal(found.view(tensor.shape), tensor), name


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
def test_damage_is_noticed_before_anything_is_there(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece_bytes: int
) -> None:
    """In large items, which are verified as they are read, and in small ones."""
    monkeypatch.setattr(Archive.__init__, "__defaults__", (piece_bytes,))
    file = checkpoint / "__0_0.distcp"
    content = file.read_bytes()
    start = content.index(Tangle().frozen.weight.detach().numpy().tobytes())
    for place in (start, start + 400, start - 100, start + 17 * 17 * 4 + 60):
        damaged = bytearray(content)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"in the checkpoint is damaged: its checksum does not match"):
            dsx.export(checkpoint, tmp_path / "out")
        assert names(tmp_path) == ["checkpoint"]
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"__0_0.distcp of the checkpoint is cut short"):
        dsx.export(checkpoint, tmp_path / "out")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"lacks its file __0_0.distcp"):
        dsx.export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == ["checkpoint"]


def test_what_ends_an_export_early_leaves_nothing(checkpoint: Path, tmp_path: Path) -> None:
    def stop(size: int) -> None:
        assert names(tmp_path) == ["checkpoint", "out.tmp"]  # what a kill would leave
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dsx.export(checkpoint, tmp_path / "out", told=stop)
    assert names(tmp_path) == ["checkpoint"]
    (tmp_path / "out.tmp").mkdir()
    (tmp_path / "out.tmp" / "model-00001-of-00009.safetensors").touch()
    dsx.export(checkpoint, tmp_path / "out")
    assert names(tmp_path) == ["checkpoint", "out"]
    assert names(tmp_path / "out") == ["model.safetensors"]


def test_what_is_there_is_not_overwritten(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    dsx.export(checkpoint, out, shard_bytes=1000)
    with pytest.raises(CheckpointError, match="is not empty") as caught:
        dsx.export(checkpoint, out)
    assert "--overwrite" in str(caught.value)
    dsx.export(checkpoint, out, overwrite=True)
    assert names(out) == ["model.safetensors"]
    (out / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="holds something that no export has written") as caught:
        dsx.export(checkpoint, out, overwrite=True)
    assert "thesis.tex" in str(caught.value)
    with pytest.raises(CheckpointError, match="is a file"):
        dsx.export(checkpoint, out / "thesis.tex")


def test_what_cannot_be_meant_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"are exported as float32, bfloat16, float16, not bfloat: did you mean"):
        dsx.export(checkpoint, tmp_path / "out", "bfloat")
    with pytest.raises(CheckpointError, match="shards of 0 bytes hold nothing"):
        dsx.export(checkpoint, tmp_path / "out", shard_bytes=0)
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        dsx.export(tmp_path / "nowhere", tmp_path / "out")
    assert names(tmp_path) == ["checkpoint"]


def test_there_must_be_room(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr("dsx.weights.folder.shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match="there is no room for") as caught:
        dsx.export(checkpoint, tmp_path / "out")
    assert "1000 bytes" in str(caught.value)
    assert names(tmp_path) == ["checkpoint"]


def test_a_checkpoint_of_before_models_were_described_is_exported_too(checkpoint: Path, tmp_path: Path) -> None:
    info = json.loads((checkpoint / INFO).read_text())
    del info["model"], info["digest"]
    info["digest"] = digest(canonical(info))
    (checkpoint / INFO).write_text(json.dumps(info))
    dsx.export(checkpoint, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    engine = dsx.prepare(Tangle(seed=2))
    engine.load(checkpoint)
    assert all(torch.equal(found[name], tensor) for name, tensor in engine.weights())


def test_the_command_exports_a_runs_latest(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    series = tmp_path / "run" / "checkpoints"
    series.mkdir(parents=True)
    checkpoint.rename(series / "step-00000001")
    (series / "latest").write_text("step-00000001\n")
    assert call(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "float16"]) == 0
    assert "31 tensors" in capsys.readouterr().out
    assert call(["export", str(tmp_path / "run"), str(tmp_path / "out")]) == 1
    assert "is not empty" in capsys.readouterr().err
    options = ["--overwrite", "--json", "--shard-size", "2KB"]
    assert call(["export", str(tmp_path / "run"), str(tmp_path / "out"), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(found["files"]) == names(tmp_path / "out")
    assert found["bytes"] == sum(p.numel() * 4 for p in Tangle().parameters()) + 17 * 4
    assert call(["export", str(tmp_path / "run"), str(tmp_path / "other"), "--shard-size", "5 apples"]) == 2
    assert "'5 apples' is no size, such as 5GB" in capsys.readouterr().err


def cannot_write(layout: str, out: str, why: str) -> str:
    """Export where only rank 0 can fail; nobody waits for ever."""
    engine = prepare(Tangle(), layout)
    if why == "full":
        import dsx.weights.writer as module

        def full(descriptor: int, data: memoryview, at: int) -> int:
            raise OSError(28, "No space left on device")

        module.os = type("os", (), {**vars(module.os), "pwrite": staticmethod(full)})  # type: ignore[assignment]
    try:
        engine.export(out)
    except CheckpointError as error:
        return str(error)
    finally:
        if why == "full":
            import os

            module.os = os
    return "no error"


@pytest.mark.parametrize(("why", "words"), [("occupied", "is not empty"), ("full", "No space left on device")])
def test_an_error_of_the_writing_rank_is_everyones(ranks, tmp_path: Path, why: str, words: str) -> None:
    out = tmp_path / "out"
    if why == "occupied":
        out.mkdir()
        (out / "config.json").touch()
    first, second = ranks.run(cannot_write, "zero3", str(out), why, world=2)
    assert first == second
    assert words in first
    assert names(tmp_path) == (["out"] if why == "occupied" else [])


def alone(out: str) -> Sequence[int]:
    engine = prepare(Tangle(), "zero3")
    if dist.get_rank():
        return ()
    with pytest.raises(RankMismatch, match="was not entered by rank 1") as caught:
        export_engine(engine, Path(out), timeout_s=0.5)
    return caught.value.ranks


def test_exporting_on_the_first_rank_only_names_the_others(ranks, tmp_path: Path) -> None:
    assert ranks.run(alone, str(tmp_path / "out"), world=2)[0] == (1,)
    assert not list(tmp_path.iterdir())
