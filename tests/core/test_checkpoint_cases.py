"""Checkpoints where other systems failed their users; the numbers are those of CASES."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import dsx
from dsx.checkpoint.archive import Archive
from dsx.checkpoint.background import Background
from dsx.checkpoint.series import Series
from dsx.errors import CheckpointError
from dsx.run.job import run
from dsx.testing import weights_of
from dsx.testing.models import Tangle, tokens
from parity import LAYOUTS, Net, sample


class Wide(nn.Module):
    """A weight of fewer rows than ranks, and nothing else."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 128), value))

    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.linear(inputs, self.weight).square().mean()


def prepare(model: nn.Module, layout: str, **sections: Any) -> dsx.Engine:
    partition = {} if layout == "replicated" else {"partition": {"use": [layout], **sections}}
    return dsx.prepare(model, partition)


def wide(layout: str, path: str, load: bool) -> dict[str, Tensor]:
    engine = prepare(Wide(0.0 if load else 1.0), layout)
    if load:
        engine.load(path)
    else:
        engine.train_step([torch.randn(4, 128, generator=torch.Generator().manual_seed(dist.get_rank()))])
        engine.save(path)
    logical = engine.program.layout.logical("exp_avg")
    return {**weights_of(engine), **{f"exp_avg {name}": tensor.clone() for name, tensor in logical}}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_more_ranks_than_rows_case_25(ranks, tmp_path: Path, layout: str) -> None:
    path = str(tmp_path / "checkpoint")
    expected = ranks.run(wide, layout, path, False, world=3)[0]
    tensors = Archive(tmp_path / "checkpoint").tensors
    assert all(tensors[f"{name}/weight"][0] == (2, 128) for name in ("weight", "exp_avg", "exp_avg_sq"))
    for found in ranks.run(wide, "zero3", path, True, world=4):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


class Mixed(Net):
    """Units with several flat parameters: two dtypes, trained and frozen."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6)) for _ in range(3)))
        for block in self.blocks:
            block[1].float()
            block[0].bias.requires_grad_(False)

    def forward(self, inputs: Tensor, classes: Tensor) -> Tensor:  # type: ignore[override]
        hidden = self.stem(inputs)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block[1](block[0](hidden).float()))
        return nn.functional.cross_entropy(self.head(hidden), classes)


def in_groups(path: str) -> tuple[int, dict[str, Tensor]]:
    engine = prepare(Mixed(), "zero3", zero3={"units": ["blocks.*.0", "blocks.*.1", "head"], "merge_bytes": 300})
    engine.train_step([sample(0, 0, dist.get_rank())])
    engine.save(path)
    return sum(len(unit.flats) for unit in engine.program.layout.units), weights_of(engine)


def test_an_export_of_a_stage_3_of_many_groups_has_all_of_them_case_74(ranks, tmp_path: Path) -> None:
    flats, expected = ranks.run(in_groups, str(tmp_path / "checkpoint"), world=2)[0]
    assert flats > 6
    dsx.export(tmp_path / "checkpoint", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == dict(Mixed().named_parameters()).keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def full(folder: str) -> str:
    """Two of four ranks have no room for the second checkpoint."""
    import dsx.checkpoint.storage as module

    series, write_item = Series(Path(folder)), module.write_item
    engine = prepare(Tangle(), "zero2")
    engine.save(series.path(1))
    if dist.get_rank() == 0:
        series.record(series.path(1))

    def no_room(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    if dist.get_rank() in (1, 3):
        module.write_item = no_room
    try:
        engine.save(series.path(2))
    except CheckpointError as error:
        return str(error)
    finally:
        module.write_item = write_item
    return "no error"


def test_a_full_disk_on_two_of_four_ranks_fails_all_case_79(ranks, tmp_path: Path) -> None:
    words = ranks.run(full, str(tmp_path), world=4)
    assert len(set(words)) == 1
    assert "No space left on device" in words[0]
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


MANIFEST = """
[run]
name = "keep"
steps = 4
out = "{out}"
[batch]
global = 6
[model]
factory = "run_targets:model"
[data]
source = "run_targets:logged"
length = 30
[checkpoint]
every = 1
keep = 1
"""


def deleting(manifest: str) -> list[str]:
    """What this rank deletes in a run."""
    deleted: list[str] = []
    delete = Series._delete
    Series._delete = lambda self, path: (deleted.append(path.name), delete(self, path))[1]  # type: ignore[func-returns-value, method-assign]
    try:
        run(manifest)
    finally:
        Series._delete = delete  # type: ignore[method-assign]
    return deleted


def test_one_rank_deletes_what_is_old_case_80(ranks, tmp_path: Path) -> None:
    manifest = tmp_path / "run.toml"
    manifest.write_text(MANIFEST.format(out=tmp_path / "out"))
    assert ranks.run(deleting, str(manifest), world=3) == [[f"step-0000000{n}" for n in (1, 2, 3)], [], []]
    left = sorted(path.name for path in (tmp_path / "out" / "checkpoints").iterdir())
    assert left == ["latest", "step-00000004"]


def test_a_background_writer_that_is_stuck_is_waited_for_so_long_case_85(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, released = dsx.prepare(Tangle()), threading.Event()
    engine.train_step([tokens(0, 0, 0)])
    monkeypatch.setattr("dsx.checkpoint.background.WAIT_S", 0.2)
    monkeypatch.setattr("dsx.checkpoint.background.write", lambda *args: released.wait())
    writer = Background(engine)
    writer.save(tmp_path / "checkpoint", {}, lambda: None)
    with pytest.raises(CheckpointError, match=r"did not end within 0\.2 s"):
        writer.wait()
    released.set()
    writer.close()
