"""CUDA kernels on the CPU: a cuda.cu compiled by g++ with cuda_host.h, in place of the start of its kernels.

`on_host(operation, folder)` is the operation's `cuda` implementation, whose own Python runs as on a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from dsx_kernels import cuda_launch
from kernels.cases import TABLE, Case, Function, call

HEADER = Path(__file__).with_name("cuda_host.h")
COMPILER = shutil.which("g++")
COMPILE = ("-std=c++17", "-O0", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-w")


class Host:
    """Kernels of a cuda.cu as functions of a library; takes the place of `cuda_launch.launch`."""

    def __init__(self, source: Path, kernels: Iterable[str], folder: Path) -> None:
        self.kernels = tuple(kernels)
        text, file = folder / f"{source.parent.name}.cpp", folder / f"{source.parent.name}.so"
        text.write_text(_text(source, self.kernels))
        subprocess.run([str(COMPILER), *COMPILE, str(text), "-o", str(file)], check=True)
        self._start = ctypes.CDLL(str(file)).start
        self._start.restype = ctypes.c_char_p
        self._start.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p))

    def launch(
        self, source: Path, kernel: str, threads: int, device: torch.device, *arguments: Tensor | float | None
    ) -> None:
        values = [_value(argument) for argument in arguments]
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        block = cuda_launch.THREADS
        failure = self._start(self.kernels.index(kernel), -(-threads // block), block, places)
        assert not failure, f"{kernel}: {failure.decode()}"


def on_host(operation: str, folder: Path) -> Function:
    """The `cuda` implementation of an operation, with all kernels that its cases start."""
    function = implementation(operation)
    started = dict.fromkeys(kernel for case in TABLE[operation] for kernel in kernels_of(operation, case))
    host = Host(source_of(operation), started, folder)

    def run(*arguments: Any, **options: Any) -> Any:
        with mock.patch.object(cuda_launch, "launch", host.launch):
            return function(*arguments, **options)

    return run


def implementation(operation: str) -> Function:
    function: Function = getattr(import_module(f"dsx_kernels.{operation}.cuda"), operation)
    return function


def source_of(operation: str) -> Path:
    source: Path = import_module(f"dsx_kernels.{operation}.cuda").SOURCE
    return source


def kernels_of(operation: str, case: Case) -> list[str]:
    """What a case would start."""
    with mock.patch.object(cuda_launch, "launch") as launch:
        call(implementation(operation), case, case.make())
    return [started.args[1] for started in launch.call_args_list]


def _text(source: Path, kernels: Iterable[str]) -> str:
    cases = (
        f"    case {number}: failure = host::start(&{kernel}, blocks, threads, arguments); break;"
        for number, kernel in enumerate(kernels)
    )
    return "\n".join(
        [
            f'#include "{HEADER}"',
            f'#include "{source}"',
            'extern "C" const char* start(int kernel, unsigned blocks, unsigned threads, void** arguments) {',
            "    static std::string failure;",
            "    switch (kernel) {",
            *cases,
            "    }",
            "    return failure.c_str();",
            "}\n",
        ]
    )


_KINDS: dict[type, Callable[[Any], Any]] = {
    int: ctypes.c_int64,
    float: ctypes.c_double,
    type(None): ctypes.c_void_p,
    Tensor: lambda tensor: ctypes.c_void_p(tensor.data_ptr()),
}


def _value(argument: Tensor | float | None) -> Any:
    return _KINDS[type(argument)](argument)
