"""`block_attention`: the native implementation and the reference against dense attention in float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from built import HAS_NATIVE, needs_native
from dsx_kernels import library
from dsx_kernels.block_attention import native, reference
from kernels.attention_cases import BF16, CASES, F16, F32, F64, Case, check, run

LEVELS = library.LEVELS[: library.LEVELS.index(library.best()) + 1] if HAS_NATIVE else ()


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_is_dense_attention(case: Case) -> None:
    for dtype in (F32, BF16, F16):
        for level in LEVELS:
            with library.using(level):
                check(native.ENGINE, replace(case, dtype=dtype))


@needs_native
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_native_at_a_long_and_uneven_length(dtype: torch.dtype) -> None:
    check(native.ENGINE, Case(4097, 4097, block=128, heads=1, key_heads=1, near=4, dtype=dtype))


@pytest.mark.parametrize("dtype", [F64, F32, BF16])
def test_the_reference_is_dense_attention(dtype: torch.dtype) -> None:
    for case in CASES:
        if case.queries < 1000:
            check(reference.ENGINE, replace(case, dtype=dtype))


@needs_native
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("key_heads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(dtype: torch.dtype, key_heads: int) -> None:
    """One thread works by heads; several by heads or by blocks, whichever is less work."""
    case = Case(300, 300, block=32, heads=6, key_heads=key_heads, dtype=dtype, padding=True)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(run(native.ENGINE, case))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(tensor, other[name]), name


@needs_native
def test_a_row_without_keys_gives_zeros_and_finite_gradients() -> None:
    case = Case(40, 40, padding=True, causal=False)
    found = run(native.ENGINE, case)
    none = replace(case, near=0)
    tensors = none.tensors()
    tensors["padding"][:] = False
    call = none.call(none.layout(), tensors)
    out, lse = native.ENGINE.forward(tensors["q"], tensors["k"], tensors["v"], call)
    assert not out.any() and bool((lse == -torch.inf).all())
    grads = native.ENGINE.backward(
        tensors["grad"], tensors["grad_lse"], tensors["q"], tensors["k"], tensors["v"], out, lse, call, False
    )
    assert all(not grad.any() for grad in grads if grad is not None)
    assert all(bool(tensor.isfinite().all()) for name, tensor in found.items() if name != "lse")


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_not_a_number_stays_so(level: str) -> None:
    case = Case(64, 64, causal=False, near=9)
    tensors = case.tensors()
    tensors["q"][0, 0, 3, 5] = float("nan")
    tensors["k"][0, 1, 7, 2] = float("inf")
    with library.using(level):
        out, _ = native.ENGINE.forward(tensors["q"], tensors["k"], tensors["v"], case.call(case.layout(), tensors))
    assert bool(out[0, 0, 3].isnan().all()) and bool(out[0, 0, :3].isfinite().all())
    assert not bool(out[0, 1].isfinite().all())


@pytest.mark.parametrize(("queries", "keys", "batch"), [(0, 0, 1), (0, 5, 1), (5, 0, 1), (5, 5, 0)])
def test_nothing_to_do(queries: int, keys: int, batch: int) -> None:
    case = Case(queries, keys, batch=batch, causal=False)
    for engine in (native.ENGINE, reference.ENGINE) if HAS_NATIVE else (reference.ENGINE,):
        found = run(engine, case)
        assert not any(tensor.any() for name, tensor in found.items() if name != "lse")
        assert bool((found["lse"] == -torch.inf).all()) or keys != 0


@pytest.mark.parametrize("level", LEVELS)
def test_large_scores_do_not_overflow(level: str) -> None:
    """Each query takes the value of the key that is like itself."""
    case = Case(64, 64, causal=False, near=9, scale=1e4)
    tensors = case.tensors()
    q, v, call = tensors["q"], tensors["v"], case.call(case.layout(), tensors)
    with library.using(level):
        out, lse = native.ENGINE.forward(q, q, v, call)
        grads = native.ENGINE.backward(tensors["grad"], None, q, q, v, out, lse, call, False)
    assert torch.equal(out, v)
    assert all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
