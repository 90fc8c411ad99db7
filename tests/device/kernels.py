"""Every implementation of an operation that this device has, on every case of its table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module

from device.part import Checks, Figures
from dsx_kernels import Implementation, Operation
from dsx_kernels.choice import REFERENCE
from kernels.cases import KEYS, TABLE, Case, Function, call, check, same_bits


def checks(device: str, operation: str | None) -> Checks:
    for name in [operation] if operation else TABLE:
        for implementation in operation_of(name).implementations():
            if implementation.name != REFERENCE and device in implementation.devices:
                yield from _of(implementation, name, device)


def operation_of(name: str) -> Operation:
    found: Operation = import_module(f"dsx_kernels.{name}.ops").OPERATION
    return found


def _of(implementation: Implementation, operation: str, device: str) -> Checks:
    if (reason := implementation.missing()) is not None:
        yield f"{implementation.name}", partial(_is_missing, reason)
        return
    function = implementation.load()
    served = [case for case in TABLE[operation] if case.tensors[KEYS[operation]] in implementation.dtypes]
    for case in served:
        yield f"{implementation.name}: {case}", partial(_is_the_reference, function, case, device)
    if operation != "squares":
        case = max(served, key=lambda case: (len(set(case.tensors.values())), case.size))
        yield f"{implementation.name}: {case} in pieces", partial(_does_not_depend_on_the_cut, function, case, device)


def _is_missing(reason: str) -> Figures:
    raise AssertionError(reason)


def _is_the_reference(function: Function, case: Case, device: str) -> Figures:
    first = check(function, case, device)
    again = call(function, case, case.make(device))
    different = [name for name, tensor in again.items() if not same_bits(tensor.cpu(), first[name])]
    assert not different, f"other bits in {', '.join(different)} when it runs again"
    return None


def _does_not_depend_on_the_cut(function: Function, case: Case, device: str) -> Figures:
    whole, tensors = call(function, case, case.make(device)), case.make(device)
    for start, stop in _pieces(case.size):
        call(function, case, {name: tensor[start:stop] for name, tensor in tensors.items()})
    different = [name for name, tensor in whole.items() if not same_bits(tensors[name].cpu(), tensor.cpu())]
    assert not different, f"other bits in {', '.join(different)}"
    return None


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    start, length = 0, 1
    while start < size:
        yield start, min(start + length, size)
        start, length = start + length, length * 2 + 1
