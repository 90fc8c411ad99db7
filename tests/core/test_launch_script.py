"""`dsx run MANIFEST SCRIPT ARGS`: a user's own training script as a rank, or as many."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsx.cli import call
from dsx.cli.run import command
from dsx.launch.script import MANIFEST

MANIFEST_TEXT = '[run]\nname = "own"\n[batch]\nmicro = 2\nglobal = 16\n'
SCRIPT = """
import json, os, sys
import torch, dsx
import beside

torch.manual_seed(0)
engine = dsx.prepare(torch.nn.Linear(2, 1))
rank, world = engine.program.transport.rank, engine.program.transport.world
engine.backward(engine(torch.full((4, 2), rank + 1.0)).sum())
engine.step()
told = [__name__, sys.argv, rank, world, engine.accumulation, os.environ.get("DSX_TIMEOUT")]
if rank == 0:
    print(json.dumps(told))
if sys.argv[1:] == ["--fail"]:
    beside.fail()
if sys.argv[1:] == ["--exit"]:
    sys.exit(3)
"""


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text(MANIFEST_TEXT)
    (tmp_path / "beside.py").write_text("def fail():\n    raise ValueError('in the script')\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MANIFEST, "")  # to be put back
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    return tmp_path / "train.py"


def test_alone_in_this_process(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["run", "run.toml", "--set", "batch.global=12", "train.py", "--nproc", "9", "-x"]
    assert call(words) == 0
    assert capfd.readouterr().out == '["__main__", ["train.py", "--nproc", "9", "-x"], 0, 1, 6, null]\n'


def test_an_error_is_shown_from_the_script_on(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "run.toml", "train.py", "--fail"]) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith('  File "train.py", line ')
    assert lines[-1] == "ValueError: in the script"


def test_its_exit_code_is_that_of_dsx_run() -> None:
    with pytest.raises(SystemExit) as caught:
        call(["run", "run.toml", "train.py", "--exit"])
    assert caught.value.code == 3


def test_on_two_ranks() -> None:
    out, err, code = dsx("run", "run.toml", "--nproc=2", "--timeout", "30", "train.py", "--fail")
    assert out == '["__main__", ["train.py", "--fail"], 0, 2, 4, "25"]\n'
    assert code == 1
    assert 'File "train.py", line ' in err and "ValueError: in the script" in err
    assert "dsx/launch" not in err.partition("found:")[2]


def test_as_the_ranks_that_mpirun_started() -> None:
    sizes = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": str(os.getpid())}
    first, second = (
        start("run", "run.toml", "--timeout", "30", "train.py", OMPI_COMM_WORLD_RANK=rank, **sizes) for rank in "01"
    )
    out, err = first.communicate(timeout=60)
    assert (second.communicate(timeout=60)[0], second.returncode) == ("", 0)
    assert (out, first.returncode) == ('["__main__", ["train.py"], 0, 2, 4, "25"]\n', 0), err


def test_what_cannot_be_run_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    assert call(["run", "run.toml", "missing.py"]) == 1
    err = capfd.readouterr().err
    assert "the script cannot be read" in err and "where: missing.py" in err
    assert call(["run", "run.toml", "--overwrite", "train.py"]) == 2
    assert "--resume and --overwrite are for runs without a script" in capfd.readouterr().err
    assert call(["run", "run.toml", "--nnodes", "2:x"]) == 2
    assert "neither a number of hosts, such as 2, nor a range, such as 1:2" in capfd.readouterr().err
    assert call(["run", "run.toml", "--nnodes", "2", "train.py"]) == 1
    assert "several hosts need a place to meet" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["m.toml", "--resume"], {"resume": "latest", "script": ()}),
        (["m.toml", "--resume", "--nproc", "2"], {"resume": "latest", "nproc": 2}),
        (["m.toml", "--resume", "runs/a/checkpoints/9"], {"resume": "runs/a/checkpoints/9", "script": ()}),
        (["--nproc", "2", "m.toml", "--overwrite", "t.py", "--resume"], {"script": ("t.py", "--resume")}),
        (["--set=a=1", "m.toml", "--set", "b=2", "t.py", "--set", "c"], {"script": ("t.py", "--set", "c")}),
        (["m.toml", "--", "t.py", "--nproc", "2"], {"script": ("t.py", "--nproc", "2"), "nproc": None}),
        (["m.toml", "--nnodes", "1:4"], {"hosts": (1, 4), "max_restarts": None}),
        (["m.toml"], {"resume": None, "timeout": 600, "hosts": None}),
    ],
)
def test_options_stand_before_the_script(words: list[str], expected: dict[str, object]) -> None:
    found = command.make_context("run", list(words)).params
    assert {name: found[name] for name in expected} == expected


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from dsx.cli import main; main()", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def dsx(*words: str) -> tuple[str, str, int]:
    process = start(*words)
    out, err = process.communicate(timeout=60)
    return out, err, process.returncode
