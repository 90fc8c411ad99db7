"""Every implementation of an operation that this device has, on every case of its table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TypeVar

import torch
from torch import Tensor

from device.part import Checks, Figures
from dsx_kernels import Implementation, Operation, library
from dsx_kernels.choice import REFERENCE
from kernels.cases import ELEMENTWISE, EXACT, KEYS, TABLE, Case, Function, call, check, run, same_bits

Result = TypeVar("Result")


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
        yield f"{implementation.name}", partial(missing, reason)
        return
    function = implementation.load()
    served = [case for case in TABLE[operation] if case.tensors[KEYS[operation]] in implementation.dtypes]
    for case in served:
        yield f"{implementation.name}: {case}", partial(_is_the_reference, function, case, device)
    case = max(served, key=lambda case: (len(set(case.tensors.values())), case.size))
    if device == "cuda":
        yield f"{implementation.name}: on the current stream", partial(_runs_on_the_current_stream, function, case)
    if operation in ELEMENTWISE:
        yield f"{implementation.name}: {case} in pieces", partial(_does_not_depend_on_the_cut, function, case, device)
    if operation in EXACT and implementation.name != "native" and library.missing() is None:
        native = getattr(import_module(f"dsx_kernels.{operation}.native"), operation)
        yield f"{implementation.name}: the bits of native", partial(_has_the_bits_of, native, function, served, device)


def missing(reason: str) -> Figures:
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


def _has_the_bits_of(native: Function, function: Function, cases: Sequence[Case], device: str) -> Figures:
    different = [
        f"{case}: {name}"
        for case in cases
        for name, tensor in run(native, case).items()
        if not same_bits(run(function, case, device)[name], tensor)
    ]
    assert not different, f"{len(different)} of {len(cases)} cases: " + "; ".join(different[:5])
    return None


def while_written(tensors: Mapping[str, Tensor], work: Callable[[], Result]) -> Result:
    """What `work` gives on a stream that has not written its inputs yet, on the GPU, when it is given the work."""
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
        found = work()
    torch.cuda.synchronize()
    return found


def _runs_on_the_current_stream(function: Function, case: Case) -> Figures:
    """What a stream still has to write into the tensors must be there when the kernel reads them."""
    wanted, tensors = run(function, case, "cuda"), case.make("cuda")
    found = while_written(tensors, lambda: call(function, case, tensors))
    different = [name for name, tensor in found.items() if not same_bits(tensor.cpu(), wanted[name])]
    assert not different, f"other results in {', '.join(different)}: it did not wait for its stream"
    return None


def _pieces(size: int) -> Iterator[tuple[int, int]]:
    start, length = 0, 1
    while start < size:
        yield start, min(start + length, size)
        start, length = start + length, length * 2 + 1
