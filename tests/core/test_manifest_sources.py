"""Where a manifest comes from: files, dicts, --set; and what stays the same whatever the source."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from dsx.errors import ManifestError
from dsx.manifest import Manifest, Origin

GIVEN = {
    "run": {"steps": 3},
    "model": {"factory": "a:b", "sizes": [1, {"x": [2.5]}]},
    "optimize": {"use": ["adamw"], "adamw": {"lr": 0.1}},
}


def written(folder: Path, text: str | bytes, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ManifestError) as caught:
        Manifest.load(path)
    (problem,) = caught.value.problems
    assert problem.file == path
    assert caught.value.__cause__ is None
    return str(caught.value).splitlines()[1].strip().replace(str(path), "FILE")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\nsteps = <STEPS>\n", "FILE:2: manifest: this is not valid TOML: Invalid value (column 9 of `steps ="),
        ("[run]\nsteps = ${STEPS}\n", "FILE:2: manifest: this is not valid TOML: Invalid value"),
        ("[run]\r\nsteps = 1\r\nsteps = 2\r\n", "FILE:3: manifest: this is not valid TOML: Cannot overwrite a value"),
        ("[run]\n[run]\n", "FILE:2: manifest: this is not valid TOML: Cannot declare"),
        ('{"run": {"steps": 3}}', "FILE:1: manifest: this is not valid TOML"),
        ("[run]\nname = 'x", "FILE:2: manifest: this is not valid TOML"),
        ("x = " + "[" * 5000, "FILE: manifest: this is not valid TOML"),
        ("x = " + "9" * 5000, "FILE: manifest: this is not valid TOML"),
        (b"[run]\nname = '\xff'\n", "FILE:2: manifest: this is not a text in UTF-8; expected a TOML file"),
    ],
)
def test_case_16_what_is_not_toml_is_refused_with_its_line(tmp_path: Path, text: str | bytes, words: str) -> None:
    assert refusal(written(tmp_path, text)).startswith(words)


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.toml") == "FILE: manifest: there is no such file"
    assert refusal(tmp_path) == "FILE: manifest: this is a folder; expected a TOML file"
    assert refusal(written(tmp_path, "") / "below") == "FILE: manifest: the file cannot be read: Not a directory"
    assert refusal(Path("a\0b")).startswith("FILE: manifest: the file cannot be read: ")


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    manifest = Manifest.load(written(tmp_path, b"\xef\xbb\xbf[run]\r\nsteps = 3\r\n"))
    assert (manifest.run.steps, manifest.origin("run.steps").line) == (3, 2)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("model.x=1e-4", 1e-4),
        ("model.x=true", True),
        ("model.x=[1, 2]", [1, 2]),
        ("model.x={ a = 1 }", {"a": 1}),
        ("model.x=runs/a b", "runs/a b"),
        ("model.x='3'", "3"),
        ("model.x=", ""),
        ("model.x=a=b", "a=b"),
        ("model.x = 3 # three", 3),
        ("model.x=1\ny=2", "1\ny=2"),
    ],
)
def test_a_set_value_is_toml_or_else_a_plain_string(setting: str, value: object) -> None:
    manifest = Manifest.of(GIVEN, [setting])
    assert manifest.model is not None
    assert manifest.model.keywords()["x"] == value
    assert str(manifest.origin("model.x")) == "--set"


def test_set_makes_tables_takes_quoted_keys_and_the_later_wins(tmp_path: Path) -> None:
    path = written(tmp_path, '[optimize]\nuse = ["adamw"]\n')
    manifest = Manifest.load(
        path, ["optimize.adamw.lr=1", "optimize.adamw.lr=2", 'model={factory = "a:b"}', 'model."x.y=z".w=3']
    )
    assert manifest.optimize.tables["adamw"]["lr"] == 2
    assert manifest.model is not None and manifest.model.keywords() == {"x.y=z": {"w": 3}}
    assert manifest.origin("optimize.use") == Origin("file", path, 2)
    assert {str(manifest.origin(key)) for key in ("optimize.adamw", "model.factory", 'model."x.y=z"')} == {"--set"}


@pytest.mark.parametrize(
    "setting", ["", "run.steps", "=3", " =3", ".=3", "a b=3", "run..steps=1", "#a=1", "#a\nb=1", "[a]\nb=1"]
)
def test_a_set_without_a_key_is_refused(setting: str) -> None:
    with pytest.raises(ManifestError, match=r"(?s)--set: .*no key before a '='; expected something like"):
        Manifest.of(None, [setting])


def test_set_does_not_go_through_a_scalar_and_its_problems_join_the_others(tmp_path: Path) -> None:
    path = written(tmp_path, "[run]\nsteps = 3\nseed = -1\n")
    with pytest.raises(ManifestError) as caught:
        Manifest.load(path, ["run.steps.x=1", "run.sed=1"])
    found = [str(problem) for problem in caught.value.problems]
    assert found[0].startswith("--set: run.steps.x=1: run.steps is 3, not a table")
    assert found[1] == "--set: run.sed: unknown key; did you mean 'seed'?"
    assert found[2].startswith(f"{path}:3: run.seed: -1 will not do")


def test_a_table_that_set_replaces_leaves_no_origin_behind(tmp_path: Path) -> None:
    path = written(tmp_path, "[batch]\nglobal = 8\nmicro = 4\n")
    manifest = Manifest.load(path, ["batch={ micro = 2 }"])
    assert (manifest.batch.global_, manifest.batch.micro) == (None, 2)
    assert (manifest.origin("batch.global").kind, manifest.origin("batch.micro").kind) == ("default", "--set")


def test_origins_read_well(tmp_path: Path) -> None:
    path = written(tmp_path, "[run]\nsteps = 3\n[model]\nfactory = 'a:b'\nsizes = [\n1,\n2]\n")
    manifest = Manifest.load(path, ["run.seed=1"])
    assert str(manifest.origin("run.steps")) == f"{path}:2"
    assert str(manifest.origin("model.sizes[1]")) == f"{path}:5"
    assert str(manifest.origin("run.seed")) == "--set"
    assert str(manifest.origin("run.name")) == "the default"
    assert str(Manifest.of(GIVEN).origin("optimize.adamw.lr")) == "a dict"


def test_of_takes_a_path_a_dict_a_manifest_or_nothing(tmp_path: Path) -> None:
    path = written(tmp_path, "[run]\nsteps = 3\n")
    manifest = Manifest.of(str(path))
    assert manifest == Manifest.of(path) == Manifest.load(path) == Manifest.of({"run": {"steps": 3}})
    assert (manifest.path, Manifest.of(None).path) == (path, None)
    assert Manifest.of(manifest) is manifest
    changed = Manifest.of(manifest, ["run.seed=4"])
    assert (changed.run.steps, changed.run.seed, manifest.run.seed) == (3, 4, 0)
    assert changed.origin("run.steps").line == 2
    assert Manifest.of({"run": {"out": tmp_path}}).run.folder == tmp_path
    wrong: Any = 3
    with pytest.raises(TypeError, match="a path, a dict, a Manifest or None, not a int"):
        Manifest.of(wrong)


def test_the_problems_of_a_dict_have_no_file() -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.of({"run": {"steps": None, 3: 4}, "zero": 1})
    assert {(problem.key, problem.file, problem.line) for problem in caught.value.problems} == {
        ("run.steps", None, None),
        ("run.3", None, None),
        ("zero", None, None),
    }


def test_the_digest_is_of_the_content_alone(tmp_path: Path) -> None:
    one = written(tmp_path, "[run]\nsteps = 3\nseed = 1\n[model]\nfactory = 'a:b'\nday = 2020-01-01\n")
    two = written(
        tmp_path, "# other\n[model]\nday = 2020-01-01 # a day\nfactory = 'a:b'\n[run]\nseed = 1\nsteps = 3\n", "b"
    )
    digest = Manifest.load(one).digest()
    assert len(digest) == 64
    assert digest == Manifest.load(two).digest() == Manifest.of(Manifest.load(one).to_dict()).digest()
    assert digest != Manifest.load(one, ["run.seed=2"]).digest()
    assert digest != Manifest.load(one, ["model.day='2020-01-01'"]).digest()
    assert Manifest.of({"run": {"steps": 1}}).digest() != Manifest.of({"run": {"compile": True}}).digest()


def test_to_dict_is_what_was_given_and_a_copy() -> None:
    source = copy.deepcopy(GIVEN)
    manifest = Manifest.of(source)
    source["model"]["sizes"].append(3)
    plain = manifest.to_dict()
    assert plain == GIVEN
    plain["model"]["sizes"].append(3)
    assert manifest.to_dict() == GIVEN


def test_nothing_of_a_manifest_changes() -> None:
    manifest: Any = Manifest.of(GIVEN)
    for place, name in ((manifest, "run"), (manifest.run, "steps"), (manifest.optimize, "use")):
        with pytest.raises(AttributeError):
            setattr(place, name, 1)
    for table in (manifest.optimize.tables, manifest.optimize.tables["adamw"], manifest.model.arguments):
        with pytest.raises(TypeError):
            table["x"] = 1
        with pytest.raises(AttributeError, match="a manifest does not change"):
            table._content = {}
    assert manifest.model.arguments["sizes"] == (1, {"x": (2.5,)})
    manifest.model.keywords()["sizes"].append(3)
    assert manifest.to_dict() == GIVEN


def test_a_manifest_travels_between_processes_and_is_a_key() -> None:
    manifest = Manifest.of(GIVEN, ["run.seed=3"])
    for twin in (pickle.loads(pickle.dumps(manifest)), copy.deepcopy(manifest)):
        assert twin == manifest and hash(twin) == hash(manifest)
        assert twin.digest() == manifest.digest() and twin.origin("run.seed").kind == "--set"
    assert manifest != Manifest.of(GIVEN)
