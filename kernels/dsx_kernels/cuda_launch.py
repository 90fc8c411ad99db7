"""The start of CUDA kernels: a cuda.cu is compiled by NVRTC for the dtypes of a call, when it is first called so.

Both are reached through CuPy, which is imported no earlier. Arithmetic is that of native.cpp: no fused multiply-add,
quotients and roots rounded to nearest, subnormal numbers kept.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.errors import KernelUnavailable

THREADS, ACCESS = 256, 16
"""Threads of a block, and bytes of the widest access to memory: those of cuda.cuh."""

OPTIONS = ("-std=c++17", "-default-device", "-fmad=false", "-ftz=false", "-prec-div=true", "-prec-sqrt=true")

TYPES = {torch.float32: "float", torch.bfloat16: "dsx::bf16", torch.float16: "dsx::f16", torch.float64: "double"}
NONE = "dsx::none"
"""How numbers.h calls dtypes, and cuda.cuh a tensor that is not given."""


def launch(source: Path, kernel: str, threads: int, device: torch.device, *arguments: Tensor | float | None) -> None:
    """Start a kernel on torch's current stream of a device.

    source     its cuda.cu
    kernel     its name with all template arguments
    threads    how many it needs at least; nothing is started for 0
    arguments  tensors as pointers, None as null, int as int64_t, float as double
    """
    if not threads:
        return
    import cupy

    index = torch.cuda.current_device() if device.index is None else device.index
    function = compiled(source, kernel, index)
    passed = tuple(value.data_ptr() if isinstance(value, Tensor) else value for value in arguments)
    stream = cupy.cuda.ExternalStream(torch.cuda.current_stream(index).cuda_stream, index)
    with cupy.cuda.Device(index), stream:
        function((-(-threads // THREADS),), (THREADS,), passed)


def on_slices(
    source: Path, kernel: str, tensors: Sequence[Tensor | None], *numbers: float, constants: Sequence[str] = ()
) -> None:
    """Start a kernel of `for_each` for all elements of slices.

    Its template arguments are the types of the tensors, then the constants; its arguments the tensors, their number of
    elements, how many come before vectors begin, then the numbers.
    """
    given = [tensor for tensor in tensors if tensor is not None]
    types = [NONE if tensor is None else TYPES[tensor.dtype] for tensor in tensors]
    count, each = given[0].numel(), ACCESS // min(tensor.itemsize for tensor in given)
    head = min(count, _head(given, each))
    vectors = (count - head) // each
    expression = f"dsx::{kernel}<{', '.join([*types, *constants])}>"
    threads = max(vectors, count - vectors * each)
    launch(source, expression, threads, given[0].device, *tensors, count, head, *map(float, numbers))


def aligned(tensor: Tensor, start: int = 0) -> bool:
    """Whether an element lies at a multiple of ACCESS bytes."""
    return (tensor.data_ptr() + start * tensor.itemsize) % ACCESS == 0


def _head(tensors: Sequence[Tensor], each: int) -> int:
    """Elements before one that is aligned in all tensors; all of them if there is none such."""
    starts = (start for start in range(each) if all(aligned(tensor, start) for tensor in tensors))
    return next(starts, tensors[0].numel())


@cache
def compiled(source: Path, kernel: str, device: int) -> Any:
    """A CuPy function on a GPU. `KernelUnavailable` with the compiler's words if it does not compile."""
    import cupy

    major, minor = torch.cuda.get_device_capability(device)
    binary, name = compile_for(source, kernel, f"sm_{major}{minor}")
    with cupy.cuda.Device(device), tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return cupy.RawModule(path=file.name).get_function(name)


def compile_for(source: Path, kernel: str, target: str) -> tuple[bytes, str]:
    """A kernel's machine code for a target such as sm_90, and its name there.

    Not by `RawModule(code=...)`, which adds -ftz=true: subnormal numbers would become zero.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source.read_text(), source.name, (), ())
    try:
        nvrtc.addNameExpression(program, kernel)
        nvrtc.compileProgram(program, (*OPTIONS, f"-arch={target}", f"-I{source.parent}"))
        return nvrtc.getCUBIN(program), nvrtc.getLoweredName(program, kernel)
    except nvrtc.NVRTCError as error:
        raise KernelUnavailable(
            f"{kernel} does not compile for {target}: {error}",
            where=str(source),
            found=nvrtc.getProgramLog(program).strip(),
            remedy=f"DSX_KERNELS={source.parent.name}=reference takes another implementation",
        ) from error
    finally:
        nvrtc.destroyProgram(program)
