"""Every case of an operation by Triton's interpreter: `TRITON_INTERPRET=1 python -m kernels.triton_cases OPERATION`.

A process of its own, since Triton decides at its import whether it interprets. Prints what fails, and how many passed;
exit code 1 if any failed.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from importlib import import_module

import torch
from torch import Tensor

from dsx_kernels import library
from kernels.cases import ELEMENTWISE, EXACT, TABLE, Case, Function, call, check, same_bits


def main(operation: str) -> int:
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1")
    # numpy warns of what the cases are for: infinities and what is not a number.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    from kernels.triton_interpreter import install

    install()
    function: Function = getattr(import_module(f"dsx_kernels.{operation}.triton_{operation}"), operation)
    failures = list(_failures(function, operation))
    print("\n".join(failures))
    print(f"{len(TABLE[operation]) - len(failures)} of {len(TABLE[operation])} cases of {operation} passed")
    return 1 if failures else 0


def _failures(function: Function, operation: str) -> Iterator[str]:
    native = _native(operation)
    for case in TABLE[operation]:
        try:
            found = check(function, case)
            if native is not None:
                _assert_same(found, check(native, case))
        except Exception as error:
            yield f"{case}: {error}"
    if operation in ELEMENTWISE:
        yield from _cut(function, next(case for case in TABLE[operation] if case.size == 4095 and case.offset))


def _native(operation: str) -> Function | None:
    """The library's function, if the operation has its bits."""
    if operation not in EXACT or library.missing():
        return None
    function: Function = getattr(import_module(f"dsx_kernels.{operation}.native"), operation)
    return function


def _assert_same(found: Mapping[str, Tensor], native: Mapping[str, Tensor]) -> None:
    different = [name for name, tensor in native.items() if not same_bits(found[name], tensor)]
    assert not different, f"{', '.join(different)} has other bits than by native"


def _cut(function: Function, case: Case) -> Iterator[str]:
    """An element's bits must not depend on where a slice starts, or on which block it is in."""
    whole, tensors = call(function, case, case.make()), case.make()
    for start, stop in ((0, 1), (1, 1030), (1030, case.size)):
        call(function, case, {name: tensor[start:stop] for name, tensor in tensors.items()})
    for name, tensor in whole.items():
        if not same_bits(tensors[name], tensor):
            yield f"{case}: {name} has other bits in pieces"


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1]))
