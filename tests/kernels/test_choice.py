"""Which implementation runs, who may change that, and what is said where one is missing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from built import needs_native
from dsx.errors import KernelUnavailable
from dsx_commands.kernels import command
from dsx_kernels import Found, Implementation, Operation, available, choice, found, library
from dsx_kernels.aio import Files

CPU = torch.device("cpu")


def one(tensor: Tensor) -> str:
    return "one"


def two(tensor: Tensor) -> str:
    return "two"


def operation(*more: Implementation) -> Operation:
    return Operation(
        "squares",
        Implementation("native", f"{__name__}:one", ("cpu",), (torch.float32,)),
        *more,
        Implementation("reference", f"{__name__}:two", dtypes=(torch.float32, torch.float64)),
    )


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of one test's packages or libraries is left to the next."""
    monkeypatch.delenv("DSX_KERNELS", raising=False)
    remembered = (choice._entries, found.names, library.load)
    for cached in remembered:
        cached.cache_clear()
    yield
    for cached in remembered:
        cached.cache_clear()


def test_the_first_that_serves_is_picked_once_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    tested = operation()
    with caplog.at_level(logging.INFO, "dsx.kernels"):
        assert [tested.pick(CPU, torch.float32)(torch.zeros(1)) for _ in range(3)] == ["one"] * 3
        assert tested.pick(CPU, torch.float64)(torch.zeros(1)) == "two"
        assert tested.pick(torch.device("meta"), torch.float32)(torch.zeros(1)) == "two"
    assert caplog.messages == [
        "squares on cpu, float32: native",
        "squares on cpu, float64: reference",
        "squares on meta, float32: reference",
    ]


def test_what_is_missing_is_passed_over() -> None:
    absent = Implementation("native", "nowhere:one", missing=lambda: "is not built")
    tested = Operation("squares", absent, Implementation("reference", f"{__name__}:two"))
    assert tested.pick(CPU, torch.float32)(torch.zeros(1)) == "two"


def test_the_environment_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSX_KERNELS", "adamw=native, squares=reference")
    assert operation().choose("cpu", torch.float32).name == "reference"


def test_a_choice_does_not_change_while_the_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = operation()
    before = tested.pick(CPU, torch.float32)
    monkeypatch.setenv("DSX_KERNELS", "squares=reference")
    assert tested.pick(CPU, torch.float32) is before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "sqares=native",
            ["there is no operation 'sqares'", "did you mean 'squares'?", "one of accumulate, adamw, "],
        ),
        (
            "squares=natve",
            ["squares has no implementation 'natve'", "one of native, reference", "did you mean 'native'?"],
        ),
        ("squares", ["'squares' names no implementation of an operation", "operation=implementation"]),
        ("squares=", ["'squares=' names no implementation"]),
    ],
)
def test_a_wrong_name_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, words: list[str]
) -> None:
    monkeypatch.setenv("DSX_KERNELS", text)
    with pytest.raises(KernelUnavailable) as caught:
        operation().pick(CPU, torch.float32)
    assert "where: environment variable DSX_KERNELS" in str(caught.value)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_the_environment_names_must_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSX_KERNELS", "squares=native")
    with pytest.raises(KernelUnavailable) as caught:
        operation().pick(CPU, torch.float64)
    assert str(caught.value).splitlines() == [
        "squares cannot run by 'native' for float64 on cpu",
        "  where: environment variable DSX_KERNELS",
        "  found: native is for float32",
        "  remedy: remove squares=native from it",
    ]


def test_a_dtype_that_nothing_serves_is_an_error_with_reasons() -> None:
    with pytest.raises(KernelUnavailable) as caught:
        operation().pick(CPU, torch.int64)
    assert str(caught.value).splitlines() == [
        "squares has no implementation for int64 on cpu",
        "  found: native is for float32; reference is for float32, float64",
    ]


PACKAGE = """
from dsx_kernels import Implementation, Operation

def doubled(tensor):
    return tensor * 2

FAST = Implementation("ignored", "others:doubled")
DOUBLED = Operation("doubled", Implementation("reference", "others:doubled"))
"""
ENTRIES = """
[dsx.kernels]
squares.fast = others:FAST
squares.broken = no_such_module:FAST
squares.wrong = others:doubled
doubled = others:DOUBLED
"""


@pytest.fixture
def _others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that registers kernels."""
    information = tmp_path / "others-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRIES)
    (tmp_path / "others.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_others")
def test_others_add_implementations_that_take_nothing_over(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = operation()
    assert [known.name for known in tested.implementations()] == ["native", "broken", "fast", "wrong", "reference"]
    assert tested.choose("cpu", torch.float32).name == "native"
    assert tested.choose("cpu", torch.float64).name == "fast"
    monkeypatch.setenv("DSX_KERNELS", "squares=fast")
    assert tested.pick(CPU, torch.float32)(torch.ones(1)).item() == 2.0


@pytest.mark.usefixtures("_others")
def test_others_add_operations() -> None:
    assert [(one.operation, one.name) for one in available("doubled")] == [("doubled", "reference")]
    assert "doubled" in {one.operation for one in available()}


@pytest.mark.usefixtures("_others")
def test_what_others_broke_is_said() -> None:
    missing = {one.name: one.missing for one in available("squares")}
    assert missing["fast"] is None
    assert missing["broken"] == "does not load from no_such_module:FAST: No module named 'no_such_module'"
    assert missing["wrong"] == "does not load from others:doubled: others:doubled is no dsx_kernels.Implementation"


def test_every_dtype_has_one_implementation_on_the_cpu() -> None:
    for name in found.names():
        picked = [dtype for one in available(name) for dtype in one.picked.get("cpu", ())]
        assert sorted(map(str, picked)) == sorted(map(str, choice.FLOATS)), name
        assert available(name)[-1].name == "reference"


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(KernelUnavailable, match="there is no operation 'adam'"):
        available("adam")


def without(monkeypatch: pytest.MonkeyPatch, file: Path) -> Found:
    monkeypatch.setattr(library, "FILE", file)
    return available("squares")[0]


def test_without_the_library_the_reference_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native = without(monkeypatch, tmp_path / "_native.so")
    assert native.name == "native" and native.picked == {}
    assert native.missing is not None and native.missing.startswith(
        "the native library is not built; install dsx again"
    )
    assert len(available("squares")[-1].picked["cpu"]) == 4


def test_a_library_that_does_not_load_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "_native.so").write_bytes(b"no library")
    missing = without(monkeypatch, tmp_path / "_native.so").missing
    assert (
        missing is not None and missing.startswith("the native library does not load") and "build it again" in missing
    )


@needs_native
def test_a_stale_library_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    with pytest.raises(KernelUnavailable) as caught:
        library.load()
    lines = str(caught.value).splitlines()
    assert lines[0] == "the native library is of another version"
    assert lines[2:4] == [f"  expected: interface {library.ABI}", f"  found: interface {library.ABI - 1}"]
    assert lines[4].startswith("  remedy: build it again: pip install --no-deps -e .")


@needs_native
def test_a_library_without_a_function_is_stale() -> None:
    with pytest.raises(KernelUnavailable, match="the native library has no dsx_of_tomorrow"):
        library.Function("dsx_of_tomorrow", None)()


@needs_native
def test_the_environment_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    with library.using(library.best()):
        monkeypatch.setenv("DSX_INSTRUCTIONS", "generic")
        library.load.cache_clear()
        assert library.instructions() == "generic"


def test_the_command_shows_what_runs_and_why_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "FILE", tmp_path / "_native.so")
    text = CliRunner().invoke(command, ["squares"]).output
    assert text.splitlines()[0] == "squares"
    assert "native     not here: the native library is not built" in text
    assert "reference  cpu: float32, bfloat16, float16, float64" in text


@needs_native
def test_the_command_shows_the_file_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert CliRunner().invoke(command, ["aio"]).output.splitlines() == ["aio", "  native  cpu: any dtype"]
    monkeypatch.setattr(library, "FILE", tmp_path / "_native.so")
    library.load.cache_clear()
    (missing,) = available("aio")
    assert missing.missing is not None and missing.missing.startswith("the native library is not built; install dsx")
    with pytest.raises(KernelUnavailable, match="no files can be read and written by threads here: the native library"):
        Files(tmp_path, 1)


def test_the_command_prints_json() -> None:
    records: list[dict[str, Any]] = json.loads(CliRunner().invoke(command, ["--json"]).output)
    assert {record["operation"] for record in records} == {*found.names(), "aio"}
    assert set(records[0]) == {"operation", "implementation", "devices", "missing", "picked"}


def test_looking_for_kernels_imports_neither_triton_nor_cupy() -> None:
    program = (
        "import sys, dsx_kernels; dsx_kernels.available(); print([m for m in ('triton', 'cupy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
