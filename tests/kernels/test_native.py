"""The native library against the float64 reference: every case, on each instruction set, on one thread and two."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

from dsx.errors import KernelUnavailable
from dsx_kernels import library
from kernels.cases import BF16, F16, F32, F64, TABLE, Case, Function, call, check, run, same_bits

if reason := library.missing():
    pytest.skip(f"no native library here: {reason}", allow_module_level=True)

LEVELS = library.LEVELS[: library.LEVELS.index(library.best()) + 1]
CASES = list(itertools.chain.from_iterable(TABLE.values()))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def native(operation: str) -> Function:
    function: Function = getattr(import_module(f"dsx_kernels.{operation}.native"), operation)
    return function


def ways() -> Iterator[str]:
    """Each instruction set, on one thread and on two."""
    for level in LEVELS:
        with library.using(level):
            for threads in (1, 2):
                torch.set_num_threads(threads)
                yield f"{level}, {threads} threads"


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    different = [name for name in wanted if not same_bits(found[name], wanted[name])]
    assert not different, f"{what}: other bits in {', '.join(different)}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_native_is_the_reference(case: Case) -> None:
    function = native(case.operation)
    wanted = check(function, case)
    for way in ways():
        assert_same(run(function, case), wanted, f"{case}, {way}")


@pytest.mark.parametrize("operation", ["adamw", "sgd", "cast", "accumulate", "momentum"])
def test_an_elements_bits_do_not_depend_on_the_cut(operation: str) -> None:
    """Whole, against pieces of odd lengths: each element then meets another vector, tail or block."""
    case = max((case for case in TABLE[operation] if BF16 in case.tensors.values()), key=lambda case: case.size)
    function = native(operation)
    whole = call(function, case, case.make())
    for _ in ways():
        tensors = case.make()
        for start, stop in pieces(case.size):
            call(function, case, {name: tensor[start:stop] for name, tensor in tensors.items()})
        assert_same({name: tensors[name] for name in whole}, whole, f"{case} in pieces")


@pytest.mark.parametrize("operation", ["signs", "signs_mean"])
def test_a_blocks_bits_do_not_depend_on_the_cut(operation: str) -> None:
    case = max(TABLE[operation], key=lambda case: case.size)
    blocks, function = case.shapes["counts"][0], native(operation)
    whole = call(function, case, case.make())
    for _ in ways():
        tensors = case.make()
        for start, stop in pieces(blocks):
            parts = {}
            for name, tensor in tensors.items():
                each = tensor.shape[-1] // blocks
                parts[name] = tensor[..., start * each : stop * each]
            call(function, case, parts)
        assert_same({name: tensors[name] for name in whole}, whole, f"{case} in pieces")


_SHARES = [case for case in TABLE["signs"] if "gradient" in case.tensors and case.tensors["value"] == F32]


@pytest.mark.parametrize("case", _SHARES, ids=str)
def test_signs_of_a_gradients_share_are_those_of_the_momentum(case: Case) -> None:
    """Bit for bit, where the momentum is held in the width that it is computed in."""
    tensors, apart = case.make(), case.make()
    gradient, factor = apart.pop("gradient"), apart.pop("factor", None)
    native("momentum")(apart["value"], gradient, factor, **case.options)
    plain = replace(case, tensors={name: case.tensors[name] for name in apart}, options={})
    assert_same(call(native("signs"), case, tensors), call(native("signs"), plain, apart), str(case))


LARGE = (8 << 20) + 67
"""Elements of tensors that no cache holds: what is only written then goes past the caches."""


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize(("source", "target"), [(F32, BF16), (BF16, F32), (F32, F16), (F32, F32), (F64, F32)])
def test_what_goes_past_the_caches_is_all_there(source: torch.dtype, target: torch.dtype, offset: int) -> None:
    values = torch.arange(LARGE, dtype=torch.int32).remainder_(8191).to(source)
    values[::4999], values[7::5003] = float("nan"), float("-inf")
    found = torch.empty(LARGE + offset + 1, dtype=target)
    for way in ways():
        found.fill_(-1)
        native("cast")(values, found[offset : offset + LARGE])
        torch.testing.assert_close(found[offset : offset + LARGE], values.to(target), rtol=0, atol=0, equal_nan=True)
        assert found[offset + LARGE :].eq(-1).all() and found[:offset].eq(-1).all(), f"{way}: wrote outside"


@pytest.mark.parametrize(("operation", "size"), [("adamw", LARGE // 4), ("sgd", LARGE // 2)])
def test_a_parameter_past_the_caches_is_the_rounded_weights(operation: str, size: int) -> None:
    case = next(case for case in TABLE[operation] if case.tensors["param"] == BF16 and case.size == 4095)
    tensors = replace(case, size=size).make()
    for way in ways():
        tensors["param"].zero_()
        call(native(operation), case, tensors)
        assert same_bits(tensors["param"], tensors["master"].to(BF16)), way


@pytest.mark.parametrize(("out", "ranks"), [(F32, 1), (F32, 2), (F32, 3), (F32, 4), (F32, 5), (BF16, 2)])
def test_a_mean_past_the_caches_is_that_of_its_blocks(out: torch.dtype, ranks: int) -> None:
    blocks = LARGE * 4 // out.itemsize // 1024
    words = torch.arange(ranks * blocks * 32, dtype=torch.int32).mul_(2654435761 - (1 << 32)).view(ranks, -1)
    scales = torch.linspace(0.1, 1.0, ranks * blocks).view(ranks, -1)
    counts = torch.full((blocks,), 1024, dtype=torch.int32)
    counts[-1] = 1000
    function, edges = native("signs_mean"), (0, blocks // 3, blocks // 2, blocks)
    whole, parts = torch.zeros(blocks * 1024, dtype=out), torch.zeros(blocks * 1024, dtype=out)
    for way in ways():
        function(words, scales, counts, whole)
        for start, stop in itertools.pairwise(edges):
            lanes, place = slice(start * 32, stop * 32), slice(start * 1024, stop * 1024)
            function(words[:, lanes], scales[:, start:stop], counts[start:stop], parts[place])
        assert torch.equal(whole, parts), way


def pieces(size: int) -> Iterator[tuple[int, int]]:
    start, length = 0, 1
    while start < size:
        yield start, min(start + length, size)
        start, length = start + length, length * 2 + 1


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_squares_show_what_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    squares = native("squares")
    for size in (1, 17, 5000):
        for place in {0, size // 2, size - 1}:
            tensor = torch.ones(size, dtype=dtype)
            assert torch.isfinite(squares(tensor))
            tensor[place] = bad
            for way in ways():
                assert not torch.isfinite(squares(tensor)), way


def test_squares_of_what_is_not_contiguous() -> None:
    tensor = torch.arange(12.0).view(3, 4).T
    assert native("squares")(tensor).item() == tensor.square().sum().item()


def test_squares_do_not_lose_small_numbers() -> None:
    """Added up one after the other in fp32, after the first nothing would be left of 2^20 ones."""
    tensor = torch.ones(1 + (1 << 20))
    tensor[0] = 2.0**13
    assert native("squares")(tensor).item() == pytest.approx(2.0**26 + 2.0**20, rel=1e-6)


@pytest.mark.parametrize("half", [BF16, F16])
def test_every_16_bit_number_is_widened_exactly(half: torch.dtype) -> None:
    source = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half)
    wide, back = torch.empty(2**16), torch.empty(2**16, dtype=half)
    for way in ways():
        native("cast")(source, wide)
        assert same_bits(wide, source.float()), way
        native("cast")(wide, back)
        assert same_bits(back, source), way


@pytest.mark.skipif(LEVELS == ("generic",), reason="there is one instruction set")
def test_float16_has_the_same_bits_on_every_instruction_set() -> None:
    """All of them, NaN with what they carry too, one way; the other way all upper halves of float32, and those next."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(F16)
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    floats = torch.cat([upper + low for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2000, 0x7FFF, 0xFFFF)]).view(F32)
    found = set()
    for _ in ways():
        wide, narrow = torch.empty(len(halves)), torch.empty(len(floats), dtype=F16)
        native("cast")(halves, wide)
        native("cast")(floats, narrow)
        found.add((wide.numpy().tobytes(), narrow.numpy().tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("half", [BF16, F16])
def test_numbers_between_are_rounded_as_torch_does(half: torch.dtype) -> None:
    """Around every border and middle between two numbers of 16 bits."""
    source = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(half).float()
    middles = ((source.double() + source.roll(1).double()) / 2).float()
    near = torch.cat([middles, *(torch.nextafter(middles, torch.full_like(middles, end)) for end in (1e38, -1e38))])
    found = torch.empty(len(near), dtype=half)
    for way in ways():
        native("cast")(near, found)
        assert same_bits(found, near.to(half)), way


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(KernelUnavailable, match="there is no instruction set 'avx'"), library.using("avx"):
        pass
