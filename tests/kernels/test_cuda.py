"""CUDA kernels without a GPU: every case on the CPU, compiled by g++ with cuda_host.h; how launches are laid out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from dsx_kernels import cuda_launch, library, needs
from kernels.cases import BF16, ELEMENTWISE, F16, F32, F64, TABLE, Function, call, check, same_bits
from kernels.cuda_host import COMPILER, Host, implementation, on_host, source_of
from kernels.proof import implementations

OPERATIONS = [name for name in TABLE if "cuda" in implementations(name)]

on_the_host = pytest.mark.skipif(COMPILER is None, reason="there is no g++")


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Function]:
    """Each operation's `cuda` implementation on the CPU."""
    folder = tmp_path_factory.mktemp("cuda")
    return {operation: on_host(operation, folder) for operation in OPERATIONS}


def native(operation: str) -> Function | None:
    if library.missing():
        return None
    function: Function = getattr(import_module(f"dsx_kernels.{operation}.native"), operation)
    return function


@on_the_host
@pytest.mark.parametrize("operation", OPERATIONS)
def test_cuda_is_the_reference_and_has_the_bits_of_native(operation: str, functions: dict[str, Function]) -> None:
    other = native(operation)
    for case in TABLE[operation]:
        found = check(functions[operation], case)
        for name, tensor in check(other, case).items() if other else ():
            assert same_bits(found[name], tensor), f"{case}: {name} has other bits than by native"


@on_the_host
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name in ELEMENTWISE])
def test_an_elements_bits_do_not_depend_on_the_cut(operation: str, functions: dict[str, Function]) -> None:
    """Pieces that start off alignment: an element then falls before the vectors, into another one, or behind them."""
    case = next(case for case in TABLE[operation] if case.size == 4095 and case.offset)
    whole, tensors = call(functions[operation], case, case.make()), case.make()
    for start, stop in ((0, 1), (1, 14), (14, 1043), (1043, case.size)):
        call(functions[operation], case, {name: tensor[start:stop] for name, tensor in tensors.items()})
    for name, tensor in whole.items():
        assert same_bits(tensors[name], tensor), f"{name} has other bits in pieces"


@on_the_host
@pytest.mark.parametrize("shift", range(1, 8))
def test_slices_that_are_never_aligned_together(shift: int, functions: dict[str, Function]) -> None:
    into, source = torch.randn(1000), torch.randn(1000 + shift).bfloat16()[shift:]
    wanted = into + source.float() * 0.3
    functions["accumulate"](into, source, 0.3)
    assert torch.equal(into, wanted)


@on_the_host
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_squares_show_what_is_not_finite(dtype: torch.dtype, bad: float, functions: dict[str, Function]) -> None:
    for size in (1, 63, 64, 4097, 9000):
        for place in {0, size // 2, size - 1}:
            tensor = torch.ones(size, dtype=dtype)
            assert functions["squares"](tensor).item() == size
            tensor[place] = bad
            assert not torch.isfinite(functions["squares"](tensor))


@on_the_host
def test_subnormal_numbers_are_kept(functions: dict[str, Function]) -> None:
    """Every one of float16, both ways; and in float32 a sum of them, which flushing would make zero."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(F16)
    wide, back = torch.empty(2**16), torch.empty(2**16, dtype=F16)
    functions["cast"](halves, wide)
    functions["cast"](wide, back)
    assert same_bits(wide, halves.float()) and same_bits(back, halves)
    tiny = torch.full((8,), 1e-40)
    functions["accumulate"](tiny, tiny.clone(), 1.0)
    assert torch.equal(tiny, torch.full((8,), 1e-40) * 2)


@on_the_host
def test_the_host_refuses_what_is_not_aligned(tmp_path: Path) -> None:
    source, kernel = source_of("cast"), "dsx::cast<float, float>"
    host = Host(source, [kernel], tmp_path)
    tensor = torch.zeros(64)
    with pytest.raises(AssertionError, match="dsx::cast<float, float>: an access is not aligned"):
        host.launch(source, kernel, 8, tensor.device, tensor[1:33], torch.zeros(32), 32, 0)


@on_the_host
def test_the_host_lets_a_warp_exchange_values(tmp_path: Path) -> None:
    """Within groups of 8, the last of which ends one exchange earlier than the others."""
    source = tmp_path / "cuda.cu"
    source.write_text(
        "__global__ void around(float* out) {"
        " const float next = __shfl_sync(~0u, float(threadIdx.x), (threadIdx.x + 1) % 8, 8);"
        " out[threadIdx.x] = threadIdx.x < 24 ? __shfl_sync(~0u, next, 0, 8) : next; }"
    )
    out = torch.zeros(256)
    Host(source, ["around"], tmp_path).launch(source, "around", 256, out.device, out)
    assert out[:32].tolist() == [1.0] * 8 + [9.0] * 8 + [17.0] * 8 + [25.0, 26.0, 27.0, 28.0, 29.0, 30.0, 31.0, 24.0]


@pytest.mark.parametrize("offset", range(9))
def test_vectors_begin_where_all_slices_are_aligned(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[object, ...]] = []
    monkeypatch.setattr(cuda_launch, "launch", lambda *arguments: started.append(arguments))
    into, source = torch.zeros(1024)[offset:1000], torch.zeros(1024, dtype=BF16)[offset:1000]
    implementation("accumulate")(into, source, 2)
    ((_, kernel, threads, _, *_, count, head, scale),) = started
    assert kernel == "dsx::accumulate<float, dsx::bf16>"
    assert (count, head, scale) == (1000 - offset, -offset % 8, 2.0)
    assert threads == max((count - head) // 8, count - (count - head) // 8 * 8)


def test_nothing_is_started_for_no_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_launch, "compiled", lambda *_: pytest.fail("a kernel was made"))
    implementation("cast")(torch.zeros(0), torch.zeros(0, dtype=BF16))
    assert implementation("squares")(torch.zeros(0)).item() == 0


def headers(source: Path) -> Iterator[Path]:
    for name in re.findall(r'#include "(.+)"', source.read_text()):
        yield (source.parent / name).resolve()
        yield from headers(source.parent / name)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_source_needs_no_header_but_our_own(operation: str) -> None:
    """On a machine with CuPy there may be no CUDA headers."""
    found = set(headers(source_of(operation)))
    assert all(file.is_relative_to(source_of(operation).parents[1]) for file in found)
    for file in (source_of(operation), *found):
        for line in re.findall(r"#include <.+>", file.read_text()):
            assert file.name == "numbers.h" and line in ("#include <cmath>", "#include <cstdint>", "#include <cstring>")


def test_without_cupy_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    needs.cupy.cache_clear()
    assert needs.cupy() == "needs cupy, which is not installed: pip install 'dsx-engine[gpu]'"
    needs.cupy.cache_clear()


NVRTC = """
import sys
from kernels.cuda_host import kernels_of, source_of
from kernels.registers import WANTED, wanted
from dsx_kernels.cuda_launch import compile_for
from dsx.errors import KernelUnavailable
try:
    from cupy.cuda import nvrtc
    nvrtc.getVersion()
except Exception as error:
    sys.exit(f"no NVRTC: {error}")
for operation in WANTED:
    for words, case in wanted(operation):
        binary, name = compile_for(source_of(operation), kernels_of(operation, case)[0], "sm_90")
        assert binary[:4] == b"\\x7fELF" and operation in name, words
try:
    compile_for(source_of("cast"), "dsx::cast<float, dsx::f8>", "sm_90")
except KernelUnavailable as error:
    print(error)
"""


@pytest.mark.skipif(find_spec("cupy") is None, reason="cupy is not installed: pip install '.[gpu]'")
def test_nvrtc_compiles_what_is_started() -> None:
    """As on a GPU, up to loading it; in a process of its own, since plain tests need not load cupy."""
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", NVRTC], capture_output=True, text=True, check=False, env=settings)
    if "no NVRTC" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    assert "dsx::cast<float, dsx::f8> does not compile for sm_90" in done.stdout
    assert "DSX_KERNELS=cast=reference takes another implementation" in done.stdout
