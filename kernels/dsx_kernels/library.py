"""The native library: found, loaded, checked; its functions as Python callables.

It lies beside this file, built by `pip install` from every native.cpp; an installation without a compiler lacks it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.errors import KernelUnavailable, near

FILE = Path(__file__).with_name("_native.so")
VARIABLE = "DSX_INSTRUCTIONS"
ABI = 3
"""What `dsx_abi` of native.cpp must say: it rises with every change of a function's arguments."""

LEVELS = ("generic", "avx2", "avx512")
CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""How dtypes are named to the library."""

_REMEDY = "install dsx again where a C++ compiler is: pip install --force-reinstall --no-deps --no-cache-dir dsx-engine"
_STALE = (
    "build it again: pip install --no-deps -e . in a checkout, else pip install --force-reinstall --no-deps dsx-engine"
)


def missing() -> str | None:
    """Why there is no native code here; None if there is."""
    try:
        load()
    except KernelUnavailable as error:
        return f"{error.what}; {error.remedy}" if error.remedy else error.what
    return None


@cache
def load() -> ctypes.CDLL:
    """The library, with the instruction set that the environment variable DSX_INSTRUCTIONS names, else the best.

    `KernelUnavailable` if it is not there, of another version, or the instruction set is not this processor's.
    """
    if not FILE.exists():
        raise KernelUnavailable("the native library is not built", where=str(FILE), remedy=_REMEDY)
    try:
        library = ctypes.CDLL(str(FILE))
        version = int(library.dsx_abi())
    except (OSError, AttributeError) as error:
        raise KernelUnavailable(f"the native library does not load: {error}", where=str(FILE), remedy=_STALE) from error
    if version != ABI:
        raise KernelUnavailable(
            "the native library is of another version",
            where=str(FILE),
            expected=f"interface {ABI}",
            found=f"interface {version}",
            remedy=_STALE,
        )
    if wanted := os.environ.get(VARIABLE):
        _use(library, wanted)
    return library


class Function:
    """A function of the library with its types, found at the first call: modules import where there is no library.

    The first call raises `KernelUnavailable` if the library is missing, or too old to have it.
    """

    def __init__(self, name: str, result: Any, *arguments: Any) -> None:
        self._name, self._result, self._arguments = name, result, arguments
        self._found: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._found is None:
            self._found = self._find()
        return self._found(*arguments)

    def _find(self) -> Callable[..., Any]:
        try:
            found: Any = load()[self._name]
        except AttributeError as error:
            raise KernelUnavailable(
                f"the native library has no {self._name}", where=str(FILE), remedy=_STALE
            ) from error
        found.restype, found.argtypes = self._result, self._arguments
        made: Callable[..., Any] = found
        return made


def best() -> str:
    """The best instruction set that this processor and the library have."""
    return LEVELS[int(load().dsx_best())]


def instructions() -> str:
    """The instruction set in use."""
    return LEVELS[int(load().dsx_instructions(-1))]


@contextmanager
def using(level: str) -> Iterator[None]:
    """Use an instruction set, for the whole process, within the context."""
    before = instructions()
    _use(load(), level)
    try:
        yield
    finally:
        _use(load(), before)


def _use(library: ctypes.CDLL, level: str) -> None:
    if level not in LEVELS:
        raise KernelUnavailable(
            f"there is no instruction set '{level}'",
            where=f"environment variable {VARIABLE}",
            expected=f"one of {', '.join(LEVELS)}",
            remedy=near(level, LEVELS),
        )
    if LEVELS[int(library.dsx_instructions(LEVELS.index(level)))] != level:
        raise KernelUnavailable(
            f"this processor has no {level}",
            where=f"environment variable {VARIABLE}",
            expected=f"at most {LEVELS[int(library.dsx_best())]}",
            remedy=f"remove {VARIABLE}",
        )


class Slice(ctypes.Structure):
    """`Slice` of slices.h."""

    _fields_ = (("data", ctypes.c_void_p), ("type", ctypes.c_int32))


def slices(*tensors: Tensor | None) -> ctypes.Array[Slice]:
    """Tensors as the library takes them, none as null; they must be contiguous."""
    made = (Slice * len(tensors))()
    for place, tensor in zip(made, tensors, strict=True):
        if tensor is not None:
            place.data, place.type = tensor.data_ptr(), CODES[tensor.dtype]
    return made


def numbers(*values: float) -> ctypes.Array[ctypes.c_double]:
    """Numbers as the library takes them."""
    return (ctypes.c_double * len(values))(*values)
