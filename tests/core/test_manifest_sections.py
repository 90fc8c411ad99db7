"""What the sections take, and how what they do not take is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dsx.errors import ManifestError, Problem
from dsx.manifest import Manifest, Target

WHOLE = """
[run]
name = "quickstart"
steps = 200
seed = 7
out = "elsewhere"
compile = true
overlap_publish = true
[batch]
global = 32
micro = 4
[model]
factory = "dsx_text:gpt"
layers = 4
sizes = [1, { a = 2 }]
[data]
source = "dsx_text.files:Files.open"
[partition]
use = ["zero3", "nvme_offload"]
[partition.nvme_offload]
path = "/nvme/dsx"
states = ["optimizer"]
[optimize]
use = ["adamw"]
clip_norm = 1
[checkpoint]
every = 100
[evaluate]
every = 10
samples = 64
"""


def problems_of(source: Any, set: tuple[str, ...] = ()) -> dict[str, Problem]:
    with pytest.raises(ManifestError) as caught:
        Manifest.of(source, set)
    return {problem.key: problem for problem in caught.value.problems}


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


def test_a_whole_manifest_is_read_into_its_sections(tmp_path: Path) -> None:
    manifest = Manifest.load(written(tmp_path, WHOLE))
    assert (manifest.run.name, manifest.run.steps, manifest.run.folder) == ("quickstart", 200, Path("elsewhere"))
    assert (manifest.batch.global_, manifest.batch.micro, manifest.batch.accumulation) == (32, 4, None)
    assert manifest.model is not None and manifest.model.path == "dsx_text:gpt"
    assert manifest.model.keywords() == {"layers": 4, "sizes": [1, {"a": 2}]}
    assert manifest.data == Target("dsx_text.files:Files.open")
    assert manifest.partition.use == ("zero3", "nvme_offload")
    assert manifest.partition.tables == {"nvme_offload": {"path": "/nvme/dsx", "states": ("optimizer",)}}
    assert (manifest.optimize.clip_norm, type(manifest.optimize.clip_norm)) == (1.0, float)
    assert (manifest.checkpoint.every, manifest.checkpoint.keep) == (100, 3)
    assert (manifest.evaluate.every, manifest.evaluate.samples) == (10, 64)
    assert [section.name for section in manifest.sections()][:3] == ["precision", "communicate", "partition"]


def test_the_empty_manifest_is_complete() -> None:
    manifest = Manifest.of(None)
    assert manifest == Manifest.of({})
    assert (manifest.run.steps, manifest.run.seed, manifest.run.folder) == (None, 0, Path("runs/run"))
    assert manifest.model is None and manifest.data is None
    assert all(section.use == () for section in manifest.sections())


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("zero_optimisation", "partition.use"),
        ("max_grad_norm", "optimize.clip_norm"),
        ("gradient_clipping", "optimize.clip_norm"),
        ("train_batch_size", "batch.global"),
        ("train_micro_batch_size_per_gpu", "batch.micro"),
        ("gradient_accumulation_steps", "batch.accumulation"),
        ("optimizer", "optimize"),
        ("MODEL", "model"),
        ("Check-Point", "checkpoint"),
        ("seed", "run.seed"),
        ("clip_norm", "optimize.clip_norm"),
        ("factory", "model.factory"),
    ],
)
def test_case_1_an_unknown_name_at_the_top_is_refused_with_where_it_belongs(name: str, near: str) -> None:
    for value in (1.0, {"x": 1}):
        problem = problems_of({name: value})[name]
        assert problem.what in ("unknown key", "unknown section")
        assert problem.nearest == near


def test_case_1_an_unknown_section_with_no_near_name_is_told_the_sections() -> None:
    problem = problems_of({"fp8": {"enabled": True}})["fp8"]
    assert problem.what == "unknown section"
    assert problem.expected is not None
    assert "one of the sections run, batch, model" in problem.expected
    assert "a plugin is named in `use` of its section" in problem.expected


def test_the_options_of_a_plugin_at_the_top_are_sent_to_its_section() -> None:
    assert problems_of({"optimize": {"use": ["lamb"]}, "lamb": {"lr": 1}})["lamb"].nearest == "optimize.lamb"


@pytest.mark.parametrize("key", ["run.steps", "batch.global", "batch.micro", "optimize.clip_norm", "checkpoint.keep"])
def test_case_2_auto_needs_a_value(key: str) -> None:
    problem = problems_of(None, (f"{key}=auto",))[key]
    assert "a value is needed here" in problem.what
    assert problem.expected in ("a whole number above 0", "a number above 0")
    assert problem.file == "--set"


@pytest.mark.parametrize("value", ["0", "-3", "true", "4.0", "'4'", "nan", "[4]", "{ a = 4 }"])
@pytest.mark.parametrize("key", ["run.steps", "batch.global", "batch.accumulation", "evaluate.samples"])
def test_case_4_a_count_is_a_whole_number_above_0(key: str, value: str) -> None:
    problem = problems_of(None, (f"{key}={value}",))[key]
    assert problem.expected == ("a finite number" if value == "nan" else "a whole number above 0")


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "0", "-1.0", "true", "'1'"])
@pytest.mark.parametrize("key", ["optimize.clip_norm", "optimize.clip_value"])
def test_case_4_a_clip_is_a_finite_number_above_0(key: str, value: str) -> None:
    problem = problems_of(None, (f"{key}={value}",))[key]
    assert value.strip("'") in problem.what
    assert problem.expected in ("a finite number", "a number above 0")


def test_case_4_nan_and_infinity_are_refused_in_free_arguments_and_options_too() -> None:
    found = problems_of(
        {
            "model": {"factory": "a:b", "deep": [{"x": [1.0, float("nan")]}]},
            "optimize": {"use": ["adamw"], "adamw": {"lr": float("inf")}},
        }
    )
    assert set(found) == {"model.deep[0].x[1]", "optimize.adamw.lr"}
    assert found["optimize.adamw.lr"].what == "inf is refused"


def test_case_17_a_key_with_a_blank_at_its_end_is_reported_as_odd() -> None:
    problem = problems_of({"model": {"factory": "a:b", "width ": 3}})['model."width "']
    assert problem.what == "this key begins or ends with a blank"
    assert problem.nearest == "width"


def test_all_problems_come_at_once_in_the_order_of_the_file_each_with_its_line(tmp_path: Path) -> None:
    text = '[run]\nsed = 3\nsteps = 0\n[batch]\nmicro = 4.0\nglobal = "auto"\n[optimize]\nuse = "adamw"\nlr = 1\n'
    with pytest.raises(ManifestError) as caught:
        Manifest.load(written(tmp_path, text), ["run.seed=-1"])
    found = [(problem.line, problem.key) for problem in caught.value.problems]
    lines = [(2, "run.sed"), (3, "run.steps"), (5, "batch.micro"), (6, "batch.global"), (8, "optimize.use")]
    assert found == [(None, "run.seed"), *lines, (9, "optimize.lr")]
    message = str(caught.value)
    assert "the manifest has 7 problems" in message
    assert f"{tmp_path / 'run.toml'}:2: run.sed: unknown key; did you mean 'seed'?" in message
    assert "--set: run.seed: -1 will not do; expected a whole number of 0 or more" in message


def test_options_of_a_plugin_not_in_use_are_refused_with_their_line(tmp_path: Path) -> None:
    path = written(tmp_path, '[optimize]\nuse = ["adamw"]\n\n[optimize.adamv]\nlr = 1.0\n[precision.fp16]\n')
    found = problems_of(path)
    wrong, unused = found["optimize.adamv"], found["precision.fp16"]
    assert (wrong.line, wrong.nearest) == (4, "adamw")
    assert wrong.what == "options of 'adamv', which is not in use"
    assert (unused.line, unused.nearest) == (6, None)
    assert unused.expected == "'fp16' in `use` of [precision]"


def test_a_plain_key_in_a_section_of_plugins_is_refused_with_the_nearest_key_or_plugin() -> None:
    section = {"use": ["adamw"], "clipnorm": 1.0, "adamW": 3, "adamw": 4, "lr": 1e-3, "name": "x"}
    found = problems_of({"optimize": section})
    assert found["optimize.clipnorm"].nearest == "clip_norm"
    assert found["optimize.adamW"].nearest == "adamw"
    assert found["optimize.adamw"].expected == "a table with the options of 'adamw'"
    assert "a table with the options of a plugin" in str(found["optimize.lr"].expected)
    assert found["optimize.name"].what == "unknown key"


@pytest.mark.parametrize(
    ("use", "key"),
    [("adamw", ""), (["a", "b", "a"], ""), ([""], "[0]"), (["a", 1], "[1]"), ({"a": 1}, ""), (True, "")],
)
def test_use_is_a_list_of_different_names(use: object, key: str) -> None:
    problem = problems_of({"optimize": {"use": use, "adamw": {"lr": 1}}})[f"optimize.use{key}"]
    assert problem.what.endswith("will not do")
    assert "a text that is not empty" in str(problem.expected)


def test_a_use_that_cannot_be_read_does_not_blame_the_tables_of_plugins() -> None:
    assert set(problems_of({"optimize": {"use": "adamw", "adamw": {"lr": 1}}})) == {"optimize.use"}


@pytest.mark.parametrize("path", ["gpt", "a.b", "a:b:c", "a-b:c", ":c", "a:", "a b:c", "1a:b", ""])
def test_a_factory_has_the_form_module_callable(path: str) -> None:
    problem = problems_of({"model": {"factory": path}})["model.factory"]
    assert problem.expected == 'a text of the form "module:callable"'


def test_a_model_without_a_factory_is_incomplete(tmp_path: Path) -> None:
    problem = problems_of(written(tmp_path, "[run]\n[model]\nlayers = 3\n"))["model.factory"]
    assert (problem.what, problem.line) == ("is missing", 2)


@pytest.mark.parametrize("name", ["run", "model", "optimize", "evaluate"])
def test_a_section_is_a_table(name: str) -> None:
    for value in (3, [{"a": 1}]):
        assert problems_of({name: value})[name].expected == f"a table, [{name}]"
