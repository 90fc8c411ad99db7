"""`dsx doctor`: what is there, what is not and what that costs, and what is broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dsx
from broken_plugins import install
from dsx.cli import call


def examined(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[dict[str, str]]]:
    """Exit code and findings."""
    code = call(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def of(findings: list[dict[str, str]], check: str) -> dict[str, str]:
    (found,) = [finding for finding in findings if finding["check"] == check]
    return found


def broken(findings: list[dict[str, str]]) -> list[str]:
    return [
        f"{found['check']}: {found['found']}; {found['advice']}" for found in findings if found["state"] == "broken"
    ]


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder on sys.path to put distributions in."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def distribution(site: Path, name: str, version: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_people_read_one_line_for_each_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["doctor"]) == 0
    text = capsys.readouterr().out
    for words in (
        f"dsx-engine {dsx.__version__}",
        torch.__version__,
        "threads",
        "compiler",
        "GB free",
        "installed packages",
    ):
        assert words in text
    assert text.splitlines()[-1] == "nothing is broken"


def test_what_is_not_there_says_what_that_costs(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings = examined(capsys)
    assert code == 0
    assert {finding["state"] for finding in findings} <= {"ok", "note"}
    assert all(finding["advice"] for finding in findings if finding["state"] == "note")
    assert of(findings, "gloo")["state"] == "ok"
    if not torch.distributed.is_nccl_available():
        assert "without GPUs this costs nothing" in of(findings, "nccl")["advice"]


def test_packages_are_found_without_importing_them(site: Path) -> None:
    for name in ("triton", "cupy"):
        (site / f"{name}.py").write_text(f"raise RuntimeError('{name} was imported')")
    distribution(site, "triton", "3.9.1")
    distribution(site, "cupy-cuda13x", "14.2")
    script = "from dsx.cli import main; main(['doctor', '--json'])"
    path = {"PYTHONPATH": ":".join([str(site), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", script], env=path, capture_output=True, text=True, check=True)
    findings = json.loads(done.stdout)
    assert of(findings, "triton")["found"] == "triton 3.9.1"
    assert of(findings, "cupy")["found"] == "cupy-cuda13x 14.2"


def test_two_builds_of_cupy_are_broken(capsys: pytest.CaptureFixture[str], site: Path) -> None:
    (site / "cupy.py").touch()
    distribution(site, "cupy-cuda12x", "13.0")
    distribution(site, "cupy-cuda13x", "14.2")
    code, findings = examined(capsys)
    assert code == 1
    assert broken(findings) == [
        "cupy: cupy-cuda12x 13.0, cupy-cuda13x 14.2; they overwrite each other's files: uninstall all, and install the "
        "one for your CUDA"
    ]


def test_somebody_elses_dsx_is_named(capsys: pytest.CaptureFixture[str], site: Path) -> None:
    distribution(site, "dsx", "2.0.3")
    assert call(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "the distribution `dsx` 2.0.3, somebody else's, is installed too" in text
    assert "pip uninstall dsx dsx-engine, then pip install dsx-engine" in text
    assert text.splitlines()[-1] == "broken: dsx"


def test_a_name_registered_twice_is_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 109."""
    install(monkeypatch, "twins")
    code, findings = examined(capsys)
    assert code == 1
    assert broken(findings) == [
        "plugins: 'twin' is registered by broken-twin-north 1.0 and by broken-twin-south 1.0; runs that name it are "
        "refused: uninstall one of them"
    ]


def test_unreadable_metadata_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "unreadable")
    code, findings = examined(capsys)
    assert code == 1
    (text,) = broken(findings)
    assert "broken_unreadable-1.0.dist-info/entry_points.txt" in text
    assert "reinstall or remove that package" in text


def test_plugins_are_imported_only_when_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "import_error", "no_hook", "rivals", "twins")
    code, findings = examined(capsys)
    assert (code, "broken_import_error" in sys.modules) == (1, False)
    code, findings = examined(capsys, "--plugins")
    assert code == 1
    assert of(findings, "plugin first")["state"] == "ok"
    assert "'import_error' cannot be imported: " in of(findings, "plugin import_error")["found"]
    assert "from broken-import-error 1.0" in of(findings, "plugin import_error")["found"]
    assert "dsx plugins check import_error" in of(findings, "plugin import_error")["advice"]
    assert "mark a function" in of(findings, "plugin no_hook")["advice"]
    assert len(broken(findings)) == 3


def test_without_torch_the_rest_is_still_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    code, findings = examined(capsys)
    assert code == 1
    (text,) = broken(findings)
    assert text.startswith("torch: cannot be imported: ModuleNotFoundError")
    assert "nothing trains without it" in text
    assert of(findings, "compiler")["found"]


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("/bin/false", "/bin/false does not work"),
        ("no-such-compiler", "CXX names 'no-such-compiler', which is not there"),
    ],
)
def test_a_compiler_that_does_not_work_costs_speed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, compiler: str, words: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    code, findings = examined(capsys)
    found = of(findings, "compiler")
    assert (code, found["state"]) == (0, "note")
    assert words in found["found"]
    assert "run as plain PyTorch, more slowly" in found["advice"]


def test_a_full_disk_is_noted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2e8))
    _, findings = examined(capsys)
    assert of(findings, "folder")["state"] == "note"
    assert "0.2 GB free" in of(findings, "temp")["found"]
    assert "set TMPDIR" in of(findings, "temp")["advice"]


@pytest.fixture
def many_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(512)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_threads")
def test_more_threads_than_cores_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    _, findings = examined(capsys)
    assert of(findings, "threads")["state"] == "note"
    assert "torch uses 512 of" in of(findings, "threads")["found"]


def test_a_driver_that_fails_is_broken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise RuntimeError("CUDA unknown error")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", fails)
    code, findings = examined(capsys)
    assert code == 1
    assert broken(findings) == ["GPU: RuntimeError: CUDA unknown error; run nvidia-smi, and look at the driver"]
