"""Checkpoints: exact, atomic, verified, and at any world size."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import dsx
from dsx.checkpoint.boxes import boxes
from dsx.checkpoint.folder import save
from dsx.checkpoint.info import INFO, canonical, digest
from dsx.checkpoint.series import Series
from dsx.checkpoint.storage import METADATA
from dsx.errors import CheckpointError, RankMismatch
from dsx.testing import distance, largest, weights_of
from dsx.testing.models import Tangle, tokens

MANIFESTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp64": {},
    "bf16": {"precision": {"use": ["bf16"]}, "optimize": {"clip_norm": 0.5}},
    "sgd": {"optimize": {"use": ["sgd", "wsd"], "sgd": {"lr": 0.1, "momentum": 0.9}}, "run": {"steps": 8}},
    "segment states": {"optimize": {"use": ["torch_optimizer"], "torch_optimizer": {"name": "NAdam"}}},
}


@given(st.lists(st.integers(0, 5), max_size=4), st.data())
def test_boxes_tile_a_slice_cases_21_25(shape: list[int], data: st.DataObject) -> None:
    """Any cut of any shape, each rectangle contiguous in the slice."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start = data.draw(st.integers(0, whole.numel()))
    stop = data.draw(st.integers(start, whole.numel()))
    held, rebuilt = whole.view(-1)[start:stop], torch.full_like(whole, -1)
    found = boxes(shape, start, stop)
    assert len(found) <= max(1, 2 * len(shape) - 1)
    for box in found:
        places = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        rebuilt[places] = held[box.begin : box.begin + box.numel].view(box.sizes)
    expected = torch.full_like(whole, -1).view(-1)
    expected[start:stop] = held
    assert torch.equal(rebuilt.view(-1), expected)


def data(step: int, world: int, samples: int = 12) -> tuple[Tensor, Tensor]:
    """This rank's part of the same twelve samples whatever the world size."""
    parts = [tokens(step, 0, part, 1) for part in range(samples)]
    mine = range(dist.get_rank() * samples // world, (dist.get_rank() + 1) * samples // world)
    return torch.cat([parts[i][0] for i in mine]), torch.cat([parts[i][1] for i in mine])


def make(kind: str, seed: int = 0) -> tuple[dsx.Engine, nn.Module]:
    model = Tangle(seed=seed)
    if kind in ("fp64", "segment states"):
        model = model.double()
    return dsx.prepare(model, MANIFESTS[kind]), model


def uninterrupted(kind: str, world: int, path: str) -> tuple[list[float], dict[str, Tensor]]:
    """Six updates, saving after the third."""
    engine, model = make(kind)
    losses = []
    for step in range(6):
        if step == 3:
            engine.save(path, extra={"step": step})
        losses.append(engine.train_step([data(step, world)]).loss)
    return losses[3:], {**dict(weights_of(model)), **{f"master {n}": t.clone() for n, t in engine.weights()}}


def resumed(kind: str, world: int, path: str) -> tuple[list[float], dict[str, Tensor]]:
    """The last three of them, from another initialisation."""
    engine, model = make(kind, seed=9)
    assert engine.load(path) == {"step": 3}
    assert engine.steps == 3
    losses = [engine.train_step([data(step, world)]).loss for step in range(3, 6)]
    return losses, {**dict(weights_of(model)), **{f"master {n}": t.clone() for n, t in engine.weights()}}


@pytest.mark.parametrize("kind", MANIFESTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_resuming_is_bit_for_bit_on_as_many_ranks_cases_76_87(ranks, tmp_path: Path, kind: str, world: int) -> None:
    """Masters of 16-bit parameters and the schedule included."""
    path = str(tmp_path / "checkpoint")
    before = ranks.run(uninterrupted, kind, world, path, world=world)
    after = ranks.run(resumed, kind, world, path, world=world)
    for (losses, weights), (again, restored) in zip(before, after, strict=True):
        assert losses == again
        assert distance(restored, weights) == 0


@pytest.mark.parametrize("kind", ["fp64", "segment states"])
def test_resuming_on_another_world_size_case_73(ranks, tmp_path: Path, kind: str) -> None:
    path = str(tmp_path / "checkpoint")
    ((losses, weights), _) = ranks.run(uninterrupted, kind, 2, path, world=2)
    for world in (1, 3, 4):
        for again, restored in ranks.run(resumed, kind, world, path, world=world):
            assert largest(again, losses) < 1e-11
            assert distance(restored, weights) < 1e-9


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_plain_reader_gets_whole_tensors(ranks, tmp_path: Path) -> None:
    """torch's own reader, without dsx: logical names, true shapes, (1, 17), 0-dim and empty parameters included."""
    from torch.distributed.checkpoint import FileSystemReader, load

    path = tmp_path / "checkpoint"
    ranks.run(uninterrupted, "fp32", 3, str(path), world=3)
    ((_, _),) = ranks.run(resumed, "fp32", 1, str(path), world=1)
    model = Tangle()
    found = {f"weight/{name}": torch.full_like(p, 7.0) for name, p in model.named_parameters()}
    found |= {f"exp_avg/{name}": torch.full_like(p, 7.0) for name, p in model.named_parameters() if p.requires_grad}
    load(found, storage_reader=FileSystemReader(path), no_dist=True)
    engine = dsx.prepare(model)
    engine.load(path)
    for name, tensor in engine.weights():
        assert torch.equal(found[f"weight/{name}"], tensor), name
    for name, tensor in engine.program.layout.logical("exp_avg"):
        assert torch.equal(found[f"exp_avg/{name}"], tensor), name


def random_numbers(world: int, path: str, load: bool) -> list[float]:
    import random

    engine, _ = make("fp32")
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    random.gauss(0, 1)
    if load:
        torch.manual_seed(99)
        random.seed(99)
        engine.load(path)
    else:
        engine.save(path)
    return [torch.rand(()).item(), random.random(), random.gauss(0, 1)]


def test_each_rank_goes_on_with_its_own_random_numbers_case_91(ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    first = ranks.run(random_numbers, 2, path, False, world=2)
    assert ranks.run(random_numbers, 2, path, True, world=2) == first
    assert first[0] != first[1]


def written(path: Path) -> Path:
    engine, _ = make("fp32")
    engine.train_step([tokens(0, 0, 0)])
    engine.save(path)
    return path


def fails(path: Path, words: str, model: nn.Module | None = None) -> CheckpointError:
    engine = dsx.prepare(model if model is not None else Tangle())
    with pytest.raises(CheckpointError) as caught:
        engine.load(path)
    assert words in str(caught.value), str(caught.value)
    return caught.value


def test_every_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """Not one file whose damage would load silently wrong."""
    path = written(tmp_path / "checkpoint")
    for file in sorted(path.iterdir()):
        content = bytearray(file.read_bytes())
        for place in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
            content[place] ^= 0x10
            file.write_bytes(content)
            with pytest.raises(CheckpointError, match=r"damaged|cut short|cannot be read|is no checkpoint"):
                dsx.prepare(Tangle()).load(path)
            content[place] ^= 0x10
        file.write_bytes(content)
    dsx.prepare(Tangle()).load(path)


@pytest.mark.parametrize("name", ["__0_0.distcp", "__0.sums.json", METADATA, INFO])
def test_truncated_and_missing_files_are_named_case_78(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "checkpoint")
    file = path / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    error = fails(path, "")
    assert name in str(error) or "metadata" in str(error)
    file.unlink()
    error = fails(path, "")
    assert name in str(error) or "metadata" in str(error)


def test_other_folders_are_no_checkpoints(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "there is no checkpoint")
    (tmp_path / "empty").mkdir()
    fails(tmp_path / "empty", "is no checkpoint of dsx, or one that was never finished")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "checkpoint")
    info = json.loads((path / INFO).read_text())
    info["format"] = 99
    info.pop("digest")
    info["digest"] = digest(canonical(info))
    (path / INFO).write_text(json.dumps(info))
    fails(path, "was written by a newer dsx")


class Attack:
    def __reduce__(self) -> Any:
        return print, ("code ran",)


def test_no_code_runs_from_a_checkpoint(tmp_path: Path, capsys) -> None:
    """Metadata is a pickle in torch's format: only what metadata is made of may be in it."""
    path = written(tmp_path / "checkpoint")
    (path / METADATA).write_bytes(pickle.dumps(Attack()))
    info = json.loads((path / INFO).read_text())
    info.pop("digest")
    info["files"][METADATA] = digest((path / METADATA).read_bytes())
    info["digest"] = digest(canonical(info))
    (path / INFO).write_text(json.dumps(info))
    fails(path, "names builtins.print, which no checkpoint needs")
    assert "code ran" not in capsys.readouterr().out


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "checkpoint")
    fails(path, "'rows' has another shape in the checkpoint", Tangle(width=18))
    fails(path, "the checkpoint has no parameter 'blocks.3.", Tangle(layers=4))
    fails(path, "the checkpoint has a parameter 'blocks.2.", Tangle(layers=2))


def test_states_that_a_checkpoint_lacks_start_anew_and_are_reported(tmp_path: Path) -> None:
    from dsx.checkpoint.folder import load

    path = written(tmp_path / "checkpoint")
    engine = dsx.prepare(Tangle(), {"optimize": {"use": ["sgd"], "sgd": {"lr": 0.1, "momentum": 0.9}}})
    found = load(engine, path)
    assert any("is not in the checkpoint: it starts anew" in note for note in found.notes)
    engine.train_step([tokens(1, 0, 0)])


def alone(path: str) -> str:
    engine, _ = make("fp32")
    if dist.get_rank() == 0:
        with pytest.raises(RankMismatch) as caught:
            save(engine, Path(path), timeout_s=0.5)
        return str(caught.value)
    return ""


def test_saving_on_the_first_rank_only_names_the_others_case_82(ranks, tmp_path: Path) -> None:
    words, *_ = ranks.run(alone, str(tmp_path / "checkpoint"), world=3)
    assert "was not entered by rank 1, 2 within 0.5 s" in words
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", [None, ""])
def test_no_folder_is_a_value_error_case_84(folder: Any) -> None:
    with pytest.raises(ValueError, match="the folder of a checkpoint is"):
        dsx.prepare(Tangle()).save(folder)


def test_saving_within_a_window_is_refused(tmp_path: Path) -> None:
    engine = dsx.prepare(Tangle(), {"batch": {"accumulation": 2}})
    engine.backward(engine(*tokens(0, 0, 0)))
    engine.step()
    with pytest.raises(dsx.DsxError, match="save was called within a window"):
        engine.save(tmp_path / "checkpoint")


def unwritable(path: str) -> str:
    """Rank 1 cannot write: its file's name is a folder already."""
    engine, _ = make("fp32")
    folder = Path(path)
    import dsx.checkpoint.folder as module

    def hinder(temporary: Path) -> None:
        make_folder(temporary)
        (temporary / "__1_0.distcp").mkdir()

    make_folder, module._make = module._make, hinder
    try:
        engine.save(folder)
    except CheckpointError as error:
        return str(error)
    finally:
        module._make = make_folder
    return "no error"


def test_a_rank_that_cannot_write_fails_all_alike_and_leaves_nothing_case_79(ranks, tmp_path: Path) -> None:
    """The previous one stays."""
    path = tmp_path / "checkpoint"
    written(path)
    before = (path / INFO).read_bytes()
    first, second = ranks.run(unwritable, str(path), world=2)
    assert first == second
    assert "the checkpoint cannot be written" in first
    assert "Is a directory" in first
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint"]
    assert (path / INFO).read_bytes() == before


def test_a_series_keeps_the_last_few_and_sweeps_what_a_crash_left(tmp_path: Path) -> None:
    series = Series(tmp_path, keep=2)
    engine = dsx.prepare(Tangle())
    for step in (10, 20, 5):  # the last one after a resume from an older checkpoint
        engine.save(series.path(step))
        series.record(series.path(step))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000005", "step-00000020"]
    assert series.find() == series.path(5)
    for left in ("step-00000030.tmp", ".step-00000010.deleting"):
        (tmp_path / left).mkdir()
    series.sweep()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000005", "step-00000020"]


def test_nothing_to_resume_from_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint to resume from"):
        Series(tmp_path).find()
    (tmp_path / "latest").write_text("../../etc/passwd")
    with pytest.raises(CheckpointError, match="names no checkpoint"):
        Series(tmp_path).find()


def in_background(path: str, fail: bool) -> list[str]:
    """Training goes on while a checkpoint is written; an error comes with the next wait, on every rank."""
    from dsx.checkpoint.background import Background

    engine, _ = make("fp32")
    writer, told = Background(engine), []
    for step in range(6):
        engine.train_step([data(step, 2)])
        if step in (1, 3):
            target = Path(path, "missing" if not fail else "blocked", f"step-{step}")
            try:
                writer.save(target, {"step": step}, lambda step=step: told.append(f"done {step}"))
            except CheckpointError as error:
                told.append(str(error))
    try:
        writer.close()
    except CheckpointError as error:
        told.append(str(error))
    return told


def test_a_background_checkpoint_is_what_was_there_when_it_was_asked_for(ranks, tmp_path: Path) -> None:
    assert ranks.run(in_background, str(tmp_path), False, world=2) == [["done 1", "done 3"]] * 2
    engine = dsx.prepare(Tangle())
    assert engine.load(tmp_path / "missing" / "step-3") == {"step": 3}
    assert engine.steps == 4


def test_a_background_error_reaches_every_rank_case_85(ranks, tmp_path: Path) -> None:
    """Nobody waits for ever either."""
    (tmp_path / "blocked").write_text("a file where the folder should be")
    first, second = ranks.run(in_background, str(tmp_path), True, world=2)
    assert first == second
    assert len(first) == 1  # the save after it raises it, and is not begun
    assert "cannot be made" in first[0]


def test_inspect_shows_and_verifies(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from dsx.cli import group

    path = written(tmp_path / "checkpoint")
    shown = CliRunner().invoke(group, ["inspect", str(path), "--verify"])
    assert shown.exit_code == 0, shown.output
    assert "updates    1, and 0 skipped" in shown.output
    assert "embedding.weight  [23, 17]" in shown.output
    found = json.loads(CliRunner().invoke(group, ["inspect", str(path), "--json"]).output)
    assert found["tensors"]["exp_avg/rows"] == {"shape": [1, 17], "dtype": "float32"}
    content = bytearray((path / "__0_0.distcp").read_bytes())
    content[100] ^= 1
    (path / "__0_0.distcp").write_bytes(content)
    broken = CliRunner().invoke(group, ["inspect", str(path), "--verify"])
    assert isinstance(broken.exception, CheckpointError)
