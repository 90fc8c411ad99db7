"""Ranks that start again after a failure: from which checkpoint they go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dsx
from dsx.launch.config import LaunchConfig
from dsx.launch.launch import launch_with
from dsx.run.job import run

MANIFEST = """
[run]
name = "again"
steps = 8
out = "{out}"
[batch]
global = 12
[checkpoint]
every = 2
keep = 9
[model]
factory = "run_targets:model"
[data]
length = 50
{data}
[optimize]
use = ["adamw"]
[optimize.adamw]
lr = 0.02
"""
SECOND = "step-00000002"


def write(folder: Path, after: int | None = None) -> str:
    """`after` samples the rank is killed; None: it is not."""
    data = 'source = "run_targets:logged"'
    if after is not None:
        data = f'source = "run_targets:mortal"\nafter = {after}\nmemory = "{folder}/died"'
    path = folder / "run.toml"
    path.write_text(MANIFEST.format(out=folder / "out", data=data))
    return str(path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model.safetensors")


def survive(manifest: str, capfd: pytest.CaptureFixture[str], **choices: Any) -> str:
    """What a run says that is killed once and starts again."""
    arguments = {"manifest": manifest, "elastic": True, **choices}
    assert launch_with(LaunchConfig(nproc=1, max_restarts=1), "dsx.run.show:run_and_show", arguments) == 0
    said = capfd.readouterr()
    assert "1 of 1 restarts left" in said.err
    return said.out


@pytest.fixture
def earlier(tmp_path: Path) -> dict[str, torch.Tensor]:
    """The weights of an earlier run in the same folder, never killed, that has checkpoints up to its last update."""
    run(write(tmp_path))
    assert (tmp_path / "out" / "checkpoints" / "latest").read_text() == "step-00000008\n"
    return weights(tmp_path)


def test_from_the_last_one_written_since(tmp_path, earlier, capfd) -> None:
    """Not from the one that was asked for, whose updates since would be lost."""
    said = survive(write(tmp_path, after=54), capfd, resume=SECOND)
    assert f"resumed from {tmp_path / 'out' / 'checkpoints' / 'step-00000006'}" in said
    assert all(torch.equal(value, earlier[name]) for name, value in weights(tmp_path).items())


def test_from_the_one_asked_for_if_none_was_written_since(tmp_path, earlier, capfd) -> None:
    """Not from the latest of the folder, which is an earlier run's."""
    said = survive(write(tmp_path, after=6), capfd, resume=SECOND)
    assert f"resumed from {tmp_path / 'out' / 'checkpoints' / SECOND}" in said
    assert all(torch.equal(value, earlier[name]) for name, value in weights(tmp_path).items())


@pytest.mark.parametrize(("after", "resumed"), [(30, "step-00000002"), (6, None), (0, None)])
def test_what_is_overwritten_is_not_gone_on_from(tmp_path, earlier, capfd, after, resumed) -> None:
    """Wherever the rank was killed: after a checkpoint, before one, and before it began."""
    said = survive(write(tmp_path, after=after), capfd, overwrite=True)
    assert (f"checkpoints/{resumed}" in said) if resumed else ("resumed from" not in said)
    assert all(torch.equal(value, earlier[name]) for name, value in weights(tmp_path).items())


def test_an_earlier_run_is_not_gone_on_from_unasked(tmp_path, earlier) -> None:
    with pytest.raises(dsx.DsxError, match="holds the weights of an earlier run"):
        run(write(tmp_path), elastic=True)
    assert run(write(tmp_path), elastic=True, resume="latest-or-start").notes[0].startswith("resumed from")
