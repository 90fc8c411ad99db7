"""`dsx run`, from the manifest to the weights: the same training on every world size, resumed anywhere."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dsx
from dsx.errors import CheckpointError
from dsx.run.job import Summary, run
from dsx.run.show import text
from dsx.run.state import decode, encode
from run_targets import Regression, sample

MANIFEST = """
[run]
name = "test"
steps = {steps}
out = "{out}"
[batch]
global = {batch}
[model]
factory = "run_targets:model"
[data]
source = "run_targets:{source}"
{data}
[optimize]
use = ["adamw", "warmup_linear"]
clip_norm = 0.5
[optimize.adamw]
lr = 0.02
[optimize.warmup_linear]
warmup = 2
total = 10
{more}
"""


def write(
    folder: Path, *, steps: int = 8, batch: int = 12, source: str = "logged", data: str = "length = 50", more: str = ""
) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    text = MANIFEST.format(steps=steps, out=folder / "out", batch=batch, source=source, data=data, more=more)
    path.write_text(text)
    return str(path)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "out" / "model.safetensors")


def apart(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


def seen(folder: Path) -> Counter[int]:
    return Counter(int(line) for file in (folder / "log").iterdir() for line in file.read_text().split())


def logging(folder: Path) -> str:
    (folder / "log").mkdir(parents=True)
    return f'length = 50\nheld_out = 7\nlog = "{folder / "log"}"'


def test_every_world_size_trains_alike_and_takes_each_sample_once(ranks, tmp_path: Path) -> None:
    """Cases 90 and 91: the order does not depend on the world size; initial weights do not either."""
    found: list[Summary] = []
    for world in (1, 2, 3):
        folder = tmp_path / str(world)
        manifest = write(folder, data=logging(folder))
        summaries = ranks.run(run, manifest, world=world)
        found.append(summaries[0])
        assert [summary.after.loss for summary in summaries] == [summaries[0].after.loss] * world
        assert seen(folder).total() == 8 * 12
        assert seen(folder) == seen(tmp_path / "1")
    for world, summary in zip((2, 3), found[1:], strict=True):
        assert apart(weights(tmp_path / str(world)), weights(tmp_path / "1")) < 1e-9
        assert summary.after is not None
        assert summary.after.loss == pytest.approx(found[0].after.loss, abs=1e-9)  # type: ignore[union-attr]
        assert summary.before == pytest.approx(found[0].before, abs=1e-9)


def test_evaluation_counts_each_held_out_sample_once(ranks, tmp_path: Path) -> None:
    """Seven samples on one, two and three ranks, in micro-batches that do not divide them."""
    for world in (1, 2, 3):
        folder = tmp_path / str(world)
        ranks.run(run, write(folder, steps=1, data="length = 50\nheld_out = 7"), world=world)
        model = Regression()
        model.load_state_dict(weights(folder))
        expected = sum(model(**{k: v[None] for k, v in sample(1000 + i).items()}).item() for i in range(7)) / 7
        summary = ranks.run(run, write(folder, steps=1, data="length = 50\nheld_out = 7"), (), True, world=world)[0]
        assert summary.after.samples == 7
        assert summary.after.loss == pytest.approx(expected, abs=1e-12)


CHECKPOINTS = "[checkpoint]\nevery = 3\nkeep = 5"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_resumed_on_another_world_size_no_sample_is_repeated_or_lost(ranks, tmp_path: Path, world: int) -> None:
    """A run of two ranks, stopped after six of eight updates."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    ranks.run(run, write(whole, data=logging(whole)), world=2)
    log = logging(part)
    ranks.run(run, write(part, steps=6, data=log, more=CHECKPOINTS), world=2)
    summary = ranks.run(run, write(part, data=log, more=CHECKPOINTS), (), False, "latest", world=world)[0]
    assert summary.updates == 8
    assert any("resumed from" in note for note in summary.notes)
    assert apart(weights(part), weights(whole)) < 1e-6
    assert seen(part) == seen(whole)


def test_a_run_in_the_background_saves_the_same(ranks, tmp_path: Path) -> None:
    summaries = []
    for name, more in (("plain", CHECKPOINTS), ("background", f"{CHECKPOINTS}\nbackground = true")):
        folder = tmp_path / name
        ranks.run(run, write(folder, steps=6, more=more), world=2)
        manifest = write(folder, more=more)
        summaries.append(ranks.run(run, manifest, (), False, "step-00000003", world=2)[0])
        assert (folder / "out" / "checkpoints" / "latest").read_text() == "step-00000008\n"
    assert apart(weights(tmp_path / "plain"), weights(tmp_path / "background")) == 0


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    manifest = write(tmp_path, steps=3, more=CHECKPOINTS)
    run(manifest)
    with pytest.raises(dsx.DsxError, match="holds the weights of an earlier run") as caught:
        run(manifest)
    assert "--resume" in str(caught.value)
    (tmp_path / "out" / "model.safetensors").unlink()
    with pytest.raises(dsx.DsxError, match="holds checkpoints of an earlier run"):
        run(manifest)
    assert run(manifest, overwrite=True).updates == 3
    assert run(manifest, resume="latest").notes[0].startswith("resumed from")


def test_nothing_to_resume_from(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint to resume from"):
        run(write(tmp_path), resume="latest")
    assert run(write(tmp_path, steps=2), resume="latest-or-start").updates == 2


def grown(manifest: str) -> str:
    try:
        run(manifest, resume="latest")
    except CheckpointError as error:
        return str(error)
    return ""


def test_the_same_batch_keys_on_more_ranks_are_refused(ranks, tmp_path: Path) -> None:
    """Case 107: the batch is kept, or refused; changed on purpose it is a note."""
    path = Path(write(tmp_path, steps=3, more=CHECKPOINTS))
    path.write_text(path.read_text().replace("global = 12", "micro = 4"))
    ranks.run(run, str(path), world=2)
    for words in ranks.run(grown, str(path), world=3):
        assert "with 3 ranks the same [batch] gives 12 samples an update" in words
        assert "set batch.global=8" in words
    path.write_text(path.read_text().replace("micro = 4", "global = 9").replace("steps = 3", "steps = 5"))
    summary = ranks.run(run, str(path), (), False, "latest", world=3)[0]
    assert "an update has 9 samples now; it had 8" in summary.notes


@pytest.mark.parametrize("world", [1, 2])
def test_data_that_ends_ends_the_run_with_its_last_incomplete_window(ranks, tmp_path: Path, world: int) -> None:
    folder = tmp_path / str(world)
    manifest = write(folder, steps=20, batch=8, source="once", data="length = 21")
    summary = ranks.run(run, manifest, world=world)[0]
    assert summary.updates == 3
    assert summary.notes == ("the data ended after 3 of 20 updates",)
    alone = write(tmp_path / "alone", steps=20, batch=8, source="once", data="length = 21")
    run(alone)
    assert apart(weights(folder), weights(tmp_path / "alone")) < 1e-12


def test_seeds_are_honoured(tmp_path: Path) -> None:
    """Case 92."""
    found = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(write(tmp_path / name, steps=2), [f"run.seed={seed}"])
        found.append(weights(tmp_path / name))
    assert apart(found[0], found[1]) == 0
    assert apart(found[0], found[2]) > 1e-3


def test_what_a_run_needs_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(dsx.DsxError) as caught:
        run(str(tmp_path / "run.toml"))
    for key in ("run.steps", "model.factory", "data.source", "batch.micro or batch.global"):
        assert key in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ('model.factory="nowhere:model"', "model.factory = 'nowhere:model' cannot be found"),
        ('model.factory="run_targets:nothing"', "has no attribute 'nothing'"),
        ("model.width=3", "unexpected keyword argument 'width'"),
        ('model.factory="run_targets:sample"', "missing a required argument: 'index'"),
        ("data.length=0", "the data source has no samples"),
    ],
)
def test_wrong_targets_are_named(tmp_path: Path, change: str, words: str) -> None:
    with pytest.raises(dsx.DsxError) as caught:
        run(write(tmp_path), [change])
    assert words in str(caught.value)


def test_the_end_of_a_stopped_run_says_how_to_go_on() -> None:
    summary = Summary(7, None, None, None, 1, "", ("a note",), 15)
    shown = text(summary, "run.toml")
    assert "stopped        by SIGTERM after 7 updates; a checkpoint was saved" in shown
    assert "dsx run run.toml --resume" in shown
    assert "skipped steps  1" in shown
    assert "a note" in shown


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, "x", None, True], ("b", 1): (1, (2, 3)), 4: b"\x00\xff"},
        {"generator": torch.arange(5, dtype=torch.uint8), "empty": torch.zeros(0, 3), "one": torch.tensor(2.5).half()},
    ],
)
def test_any_state_of_a_source_survives_json(value: Any) -> None:
    import json

    found = decode(json.loads(json.dumps(encode(value))))
    if isinstance(value, dict) and "generator" in value:
        assert all(
            torch.equal(found[key], tensor) and found[key].dtype == tensor.dtype for key, tensor in value.items()
        )
    else:
        assert found == value


def test_a_state_that_is_no_data_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the data source's state has a function"):
        encode({"f": encode})
