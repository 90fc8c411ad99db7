"""What every implementation of an operation is held against: one table of cases for each operation.

`check(function, case)` runs an implementation on a case's tensors and the reference on float64 copies of them, and
compares each element. A tensor lies within a larger one that is filled with NaN, which must stay as it is.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
DTYPES = (F32, BF16, F16, F64)
SIZES = (0, 1, 15, 16, 17, 4095, 4096, 100_003)
MARGIN = 40
"""Elements around a tensor that belong to nobody."""

ULPS = {
    "squares": 8,
    "adamw": 8,
    "sgd": 4,
    "cast": 0,
    "accumulate": 2,
    "momentum": 4,
    "signs": 8,
    "signs_mean": 4,
    "lamb": 8,
}
"""Largest errors, in units of the last place of the largest number that an element is the sum of, in the dtype that is
computed in: fp64 if the weights are, else fp32. Rounding to 16 bits, by way of fp32, adds half a unit of theirs and one
of fp32."""

OUTPUTS = {
    "adamw": ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "param"),
    "sgd": ("master", "momentum_buffer", "param"),
    "cast": ("target",),
    "accumulate": ("into",),
    "momentum": ("mean",),
    "signs": ("error", "bits", "scales"),
    "signs_mean": ("out",),
    "lamb": ("mean", "fresh_sq"),
}
"""Tensors that an operation writes; `squares` returns one instead, and `lamb` one more."""

Function = Callable[..., Any]


@dataclass(frozen=True)
class Case:
    """Arguments of one call.

    tensors  dtypes by name, in the order of the operation's arguments; None for one that is not given
    options  keyword arguments
    offset   elements by which tensors start after an address that is a multiple of 64 bytes
    special  some elements are NaN, infinite, zero or subnormal
    shapes   of those tensors that are not [size]
    whole    integers of a tensor that has given ones; others are any
    """

    operation: str
    tensors: Mapping[str, torch.dtype | None]
    size: int
    options: Mapping[str, Any] = field(default_factory=dict)
    offset: int = 0
    special: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    whole: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __str__(self) -> str:
        dtypes = "-".join(str(dtype).removeprefix("torch.") for dtype in self.tensors.values() if dtype)
        parts = [self.operation, dtypes, str(self.size), *(f"{key}={value}" for key, value in self.options.items())]
        parts += [f"+{self.offset}"] if self.offset else []
        parts += [f"{name}{list(shape)}".replace(" ", "") for name, shape in self.shapes.items() if name == "scales"]
        return " ".join([*parts, "special"] if self.special else parts)

    def make(self, device: str = "cpu") -> dict[str, Tensor]:
        """Its tensors, each a slice of a larger one, the same in every call."""
        return {name: self._tensor(name, dtype, device) for name, dtype in self.tensors.items() if dtype is not None}

    def _tensor(self, name: str, dtype: torch.dtype, device: str) -> Tensor:
        shape = self.shapes.get(name, (self.size,))
        size = math.prod(shape)
        values = self._values(name, dtype, size)
        start = MARGIN - MARGIN % 32 + (self.offset if dtype.is_floating_point else 0)
        room = torch.full((start + size + MARGIN,), _filling(dtype), dtype=dtype, device=device)
        room[start : start + size] = values.to(dtype)
        return room[start : start + size].view(shape)

    def _values(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {size}".encode()))
        if name in self.whole:
            return torch.tensor(self.whole[name], dtype=dtype)
        if not dtype.is_floating_point:
            return torch.randint(-(2**31), 2**31, (size,), generator=generator)
        values = torch.randn(size, generator=generator, dtype=F64) * _SCALES.get(name, 1.0)
        if self.special:
            places = torch.randperm(size, generator=generator)[: len(_SPECIAL)]
            values[places] = torch.tensor(_SPECIAL[: len(places)], dtype=F64)
        return values.square() if name.endswith("_sq") else values


def _filling(dtype: torch.dtype) -> float:
    """What lies around tensors."""
    return float("nan") if dtype.is_floating_point else 0x5A5A5A5A


_SCALES = {"gradient": 0.3, "exp_avg": 0.1, "exp_avg_sq": 0.3, "max_exp_avg_sq": 0.3, "momentum_buffer": 0.5}
_SPECIAL = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-45, -3e-41, 6e-8, 1e-38, 65504.0, -1e-5)

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "step": 3}
SGD = {"lr": 0.1, "step": 2}


def _adamw(size: int, gradient: Any, master: Any, param: Any = None, amsgrad: bool = False, **more: Any) -> Case:
    place = {key: more.pop(key) for key in ("offset", "special") if key in more}
    most = master if amsgrad else None
    tensors = {"gradient": gradient, "master": master, "exp_avg": master, "exp_avg_sq": master}
    options = {**ADAMW, "maximize": False, "multiplier": 1.0, "clip_value": None, **more}
    return Case("adamw", {**tensors, "max_exp_avg_sq": most, "param": param}, size, options, **place)


def _sgd(size: int, gradient: Any, master: Any, param: Any = None, **more: Any) -> Case:
    place = {key: more.pop(key) for key in ("offset", "special") if key in more}
    buffer = master if more.get("momentum") else None
    rest = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
    options = {**SGD, **rest, "multiplier": 1.0, "clip_value": None, **more}
    tensors = {"gradient": gradient, "master": master, "momentum_buffer": buffer, "param": param}
    return Case("sgd", tensors, size, options, **place)


_MASTERS: Sequence[tuple[Any, Any]] = (
    *((F32, param) for param in (None, BF16, F16, F32, F64)),
    *((F64, param) for param in (None, BF16, F16, F32)),
    *((half, param) for half in (BF16, F16) for param in (None, F32)),
)
_HARDER: dict[str, Sequence[dict[str, Any]]] = {
    "adamw": (
        {"amsgrad": True, "maximize": True},
        {"multiplier": 0.125, "clip_value": 0.02, "step": 1},
        {"betas": (0.0, 0.5), "weight_decay": 0.0, "multiplier": -2.0, "amsgrad": True, "step": 1000},
        {"special": True, "amsgrad": True},
        {"special": True, "clip_value": 0.5, "maximize": True},
    ),
    "sgd": (
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"momentum": 0.8, "dampening": 0.3, "maximize": True},
        {"momentum": 0.8, "dampening": 0.3, "step": 1},
        {"multiplier": 0.125, "clip_value": 0.02},
        {"special": True, "momentum": 0.9},
        {"special": True, "clip_value": 0.5, "maximize": True},
    ),
}


def _updates(name: str, make: Callable[..., Case]) -> list[Case]:
    plain = [make(size, F32, F32) for size in SIZES] + [make(size, BF16, F32, BF16) for size in SIZES]
    mixed = [make(1000, gradient, *pair) for gradient in DTYPES for pair in _MASTERS]
    moved = [make(4095, BF16, F32, BF16, offset=offset) for offset in (1, 7)] + [make(333, F32, F32, offset=3)]
    pairs = ((F32, F32, None), (F16, F32, F16), (BF16, BF16, None), (F64, F64, None))
    return plain + mixed + moved + [make(1027, *dtypes, **options) for dtypes in pairs for options in _HARDER[name]]


def _pairs(name: str, first: str, second: str, **options: Any) -> list[Case]:
    def make(one: torch.dtype, other: torch.dtype, size: int, **place: Any) -> Case:
        return Case(name, {first: one, second: other}, size, options, **place)

    pairs = list(itertools.product(DTYPES, DTYPES))
    return [
        *(make(*pair, size, special=True) for pair in pairs for size in (17, 1025)),
        *(make(*pair, size) for pair in ((F32, BF16), (BF16, F32), (F32, F16), (F16, F32)) for size in SIZES),
        *(make(F32, BF16, 4095, offset=offset) for offset in (1, 7)),
    ]


def _momentum() -> list[Case]:
    def make(size: int, mean: Any, gradient: Any, factor: Any = None, **place: Any) -> Case:
        options = {"beta": 0.9, "multiplier": 0.5, "clip_value": place.pop("clip_value", None)}
        return Case("momentum", {"mean": mean, "gradient": gradient, "factor": factor}, size, options, **place)

    return [
        *(make(size, F32, F32, F32) for size in SIZES),
        *(make(size, F32, BF16) for size in SIZES),
        *(make(1000, mean, gradient, factor) for mean in DTYPES for gradient in DTYPES for factor in (None, F32)),
        *(make(4095, F32, BF16, F32, offset=offset) for offset in (1, 7)),
        *(make(1027, *dtypes, special=True, clip_value=0.2) for dtypes in ((F32, F32, F32), (F64, F64), (BF16, BF16))),
    ]


GROUP = 1024
"""Elements of the smallest block of signs."""


def _signs() -> list[Case]:
    def make(
        value: Any, error: Any, counts: Sequence[int], block: int = GROUP, share: Sequence[Any] = (), **place: Any
    ) -> Case:
        blocks, size = len(counts), len(counts) * block
        wide = F64 if error == F64 else F32
        tensors = {"value": value, "error": error, "counts": torch.int32, "bits": torch.int32, "scales": wide}
        tensors |= dict(zip(("gradient", "factor"), share, strict=False))
        shapes = {"counts": (blocks,), "bits": (size // 32,), "scales": (blocks,)}
        options = {"beta": 0.9, "multiplier": 0.5, "clip_value": place.pop("clip_value", None)} if share else {}
        return Case("signs", tensors, size, options, shapes=shapes, whole={"counts": counts}, **place)

    full = [GROUP] * 5
    shares = ((F32, None), (BF16, F32), (F16, BF16), (F64, F64))
    return [
        make(F32, F32, []),
        *(make(F32, F32, [count]) for count in (0, 1, 31, 33, 1023, 1024)),
        *(make(value, error, [GROUP, 17, 0, 1000]) for value in DTYPES for error in DTYPES),
        *(make(*pair, [4096, 1025, 0, 3000, 4095], 4096) for pair in ((F32, F32), (BF16, F32), (F64, F64))),
        *(make(F32, F32, full, offset=offset) for offset in (1, 7)),
        *(make(*pair, [GROUP] * 3, special=True) for pair in ((F32, F32), (F64, F64), (F16, F32))),
        make(F32, F32, [GROUP] * 150),
        *(make(*pair, [GROUP, 17, 0, 1000], share=share) for pair in _SUMS for share in shares),
        *(make(*pair, [4096, 1025, 0, 3000], 4096, share=(BF16, F32)) for pair in _SUMS),
        *(make(F32, F32, full, share=(BF16, F32), offset=offset) for offset in (1, 7)),
        *(make(*pair, [GROUP] * 3, share=(F32, F32), special=True, clip_value=0.2) for pair in _SUMS),
        make(F32, F32, [GROUP] * 150, share=(BF16, F32), clip_value=0.5),
    ]


_SUMS = ((F32, F32), (None, F32), (F64, F64), (BF16, F16))
"""Dtypes of value and error."""


def _signs_mean() -> list[Case]:
    def make(ranks: int, scales: Any, out: Any, counts: Sequence[int], block: int = GROUP, **place: Any) -> Case:
        blocks, size = len(counts), len(counts) * block
        tensors = {"bits": torch.int32, "scales": scales, "counts": torch.int32, "out": out}
        shapes = {"bits": (ranks, size // 32), "scales": (ranks, blocks), "counts": (blocks,)}
        return Case("signs_mean", tensors, size, shapes=shapes, whole={"counts": counts}, **place)

    return [
        make(2, F32, F32, []),
        *(make(ranks, F32, F32, [count]) for ranks in (1, 2, 3, 5) for count in (0, 1, 33, 1023, 1024)),
        *(make(ranks, wide, out, [GROUP, 17, 0, 1000]) for ranks in (1, 4) for wide in (F32, F64) for out in DTYPES),
        *(make(ranks, F32, F32, [4096, 1025, 0], 4096, offset=1) for ranks in (1, 2)),
        make(3, F32, F32, [GROUP] * 3, special=True),
        make(2, F32, F32, [GROUP] * 150),
    ]


def _squares() -> list[Case]:
    sizes = [Case("squares", {"tensor": dtype}, size) for dtype in DTYPES for size in SIZES]
    return sizes + [Case("squares", {"tensor": dtype}, 4095, offset=3) for dtype in DTYPES]


def _lamb() -> list[Case]:
    options = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "least": 0.5}
    names = ("new", "mean", "fresh_sq", "factor_sq", "weights")
    makes = [Case("lamb", dict.fromkeys(names, dtype), size, options) for dtype in (F32, F64) for size in SIZES]
    return [
        *makes,
        Case("lamb", dict.fromkeys(names, F32), 4095, options, offset=3),
        Case("lamb", dict.fromkeys(names, F64), 4095, options, offset=1),
        Case("lamb", dict.fromkeys(names, F32), 9000, {**options, "weight_decay": 0.0, "least": 0.0, "eps": 1e-3}),
    ]


TABLE: dict[str, list[Case]] = {
    "squares": _squares(),
    "adamw": _updates("adamw", _adamw),
    "sgd": _updates("sgd", _sgd),
    "cast": _pairs("cast", "source", "target"),
    "accumulate": _pairs("accumulate", "into", "source", scale=0.3),
    "momentum": _momentum(),
    "signs": _signs(),
    "signs_mean": _signs_mean(),
    "lamb": _lamb(),
}
"""By operation; each case once."""


def call(function: Function, case: Case, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run an implementation in place on tensors of a case; what it wrote, or returned as `result`."""
    result = function(*(tensors.get(name) for name in case.tensors), **case.options)
    returned = {"result": result} if isinstance(result, Tensor) else {}
    return {**returned, **{name: tensors[name] for name in OUTPUTS.get(case.operation, ()) if name in tensors}}


def expected(case: Case) -> dict[str, Tensor]:
    """What the reference makes of float64 copies."""
    reference = getattr(import_module(f"dsx_kernels.{case.operation}.reference"), case.operation)
    return call(reference, case, {name: _exact(tensor) for name, tensor in case.make().items()})


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(F64) if tensor.is_floating_point() else tensor


def run(function: Function, case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """What an implementation writes, or returns, on the CPU. `AssertionError` if it writes what is not its to write."""
    tensors = case.make(device)
    inputs = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    found = call(function, case, tensors)
    for name, tensor in tensors.items():
        _assert_margin(case, name, tensor)
        if name not in found:
            assert same_bits(tensor.cpu(), inputs[name]), f"{case}: {name} is not its to write"
    return {name: tensor.cpu().clone() for name, tensor in found.items()}


def check(function: Function, case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """Hold what an implementation writes against the reference, and return it.

    `AssertionError` that names the output, the element and how far it is off, or what was written outside.
    """
    found = run(function, case, device)
    scales = _terms(case, case.make())
    for name, wanted in expected(case).items():
        _assert_near(case, name, found[name], wanted, scales[name])
    return found


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are the same, one NaN being like any other, and zeros of unlike sign not."""
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    return bool(torch.equal(torch.isnan(one), torch.isnan(other))) and bool(
        torch.equal(torch.nan_to_num(one, nan=1.0, posinf=None), torch.nan_to_num(other, nan=1.0, posinf=None))
        and torch.equal(torch.signbit(one)[~torch.isnan(one)], torch.signbit(other)[~torch.isnan(other)])
    )


def _assert_margin(case: Case, name: str, tensor: Tensor) -> None:
    start, stop = tensor.storage_offset(), tensor.storage_offset() + tensor.numel()
    room = torch.as_strided(tensor, (stop + MARGIN,), (1,), 0)
    around = torch.cat([room[:start], room[stop:]])
    untouched = torch.isnan(around) if room.is_floating_point() else around == _filling(room.dtype)
    assert untouched.all(), f"{case}: wrote outside of {name}"


def _assert_near(case: Case, name: str, found: Tensor, wanted: Tensor, terms: Tensor) -> None:
    if not found.is_floating_point():
        assert torch.equal(found, wanted), f"{case}: {name} differs"
        return
    computed = F64 if case.tensors[KEYS[case.operation]] == F64 else F32
    rounded = wanted.to(found.dtype)
    finite = torch.isfinite(rounded)
    alike = torch.where(torch.isnan(rounded), torch.isnan(found), found == rounded)
    assert alike[~finite].all(), f"{case}: {name} is not infinite, or not NaN, where it must be"
    if case.operation == "cast":
        assert same_bits(found, rounded), f"{case}: {name} is not what torch converts to"
        return
    limit = ULPS[case.operation] * torch.finfo(computed).eps * terms.abs() + 8 * torch.finfo(computed).smallest_normal
    if found.dtype.itemsize < computed.itemsize:
        limit = limit + _half_unit(wanted, found.dtype) + torch.finfo(F32).eps * wanted.abs()
    error = (found.to(F64) - wanted).abs()
    wrong = finite & ~(error <= limit)
    if wrong.any():
        at = int(wrong.nonzero()[0]) if wrong.ndim else 0
        values = [float(tensor.flatten()[at]) for tensor in (found, wanted, error / limit)]
        raise AssertionError(f"{case}: {name}[{at}] is {values[0]!r}, not {values[1]!r}: {values[2]:.3g} limits off")


KEYS = {
    "squares": "tensor",
    "cast": "source",
    "adamw": "master",
    "sgd": "master",
    "accumulate": "into",
    "momentum": "mean",
    "signs": "scales",
    "signs_mean": "scales",
    "lamb": "mean",
}
"""The tensor by which an operation picks its implementation, and in whose width it computes."""

ELEMENTWISE = ("adamw", "sgd", "cast", "accumulate", "momentum")
"""Operations in which an element's bits depend on its own numbers alone, wherever it lies."""
EXACT = (*ELEMENTWISE, "signs_mean")
"""Operations that have the same bits in every implementation but the reference: they add nothing up in an order of
their own."""


def _half_unit(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Half of the distance between numbers of a dtype at a value."""
    info = torch.finfo(dtype)
    power = torch.exp2(torch.floor(torch.log2(value.abs().clamp(min=info.smallest_normal))))
    return power * info.eps / 2


def _share(sizes: Mapping[str, Tensor], options: Mapping[str, Any]) -> Tensor:
    """The size of a gradient, as it is added to what an operation updates."""
    if "gradient" not in sizes:
        return torch.zeros(())
    gradient = sizes["gradient"] * abs(options["multiplier"])
    gradient = gradient if options["clip_value"] is None else gradient.clamp(max=options["clip_value"])
    return gradient * sizes.get("factor", torch.ones(()))


def _terms(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each output the sum of the sizes of what its elements are made of: what rounding errors grow with."""
    sizes = {name: tensor.to(F64).abs() for name, tensor in inputs.items()}
    options = case.options
    if case.operation in ("squares", "cast"):
        return expected(case)
    if case.operation == "accumulate":
        return {"into": sizes["into"] + sizes["source"] * abs(options["scale"])}
    if case.operation == "signs":
        scales = expected(case)["scales"]
        whole = scales.repeat_interleave(case.size // max(1, len(scales)))
        value = 2 * sizes.get("value", torch.zeros(())) + sizes["error"]
        return {"scales": scales, "bits": scales, "error": value + _share(sizes, options) + whole}
    if case.operation == "signs_mean":
        whole = sizes["scales"].sum(0).repeat_interleave(case.size // max(1, len(sizes["counts"])))
        return {"out": whole + sizes["out"]}
    if case.operation == "lamb":
        return _lamb_terms(case, sizes, options)
    gradient = _share(sizes, options)
    if case.operation == "momentum":
        return {"mean": 2 * sizes["mean"] + gradient}
    if case.operation == "sgd":
        gradient = gradient + options["weight_decay"] * sizes["master"]
        buffer = options["momentum"] * sizes.get("momentum_buffer", torch.zeros(())) + gradient
        weight = sizes["master"] + options["lr"] * (gradient + buffer)
        return {"master": weight, "momentum_buffer": buffer, "param": weight}
    states = expected(replace(case, tensors={**case.tensors, "param": None}))
    square = states["max_exp_avg_sq" if "max_exp_avg_sq" in states else "exp_avg_sq"]
    mean = sizes["exp_avg"] + (1 - options["betas"][0]) * (gradient + sizes["exp_avg"])
    root = (square / (1 - options["betas"][1] ** options["step"])).sqrt() + options["eps"]
    weight = sizes["master"] + options["lr"] / (1 - options["betas"][0] ** options["step"]) * mean / root
    return {**states, "master": weight, "param": weight, "exp_avg": mean}


def _lamb_terms(case: Case, sizes: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Tensor]:
    mean, take = sizes["mean"], 1 / (1 - options["betas"][0])
    gradient = mean + (sizes["new"] + mean) * take
    fresh = options["betas"][1] * sizes["fresh_sq"] + (1 - options["betas"][1]) * gradient.square()
    found = expected(case)
    step = sizes["new"] + options["weight_decay"] * sizes["weights"]
    floor = sizes["factor_sq"].square() * options["least"]
    root = torch.maximum(found["fresh_sq"], floor).sqrt()  # an error of `fresh` is that of the root, over twice of it
    spread = torch.maximum(fresh, floor) / root + options["eps"] * sizes["factor_sq"]
    smallest = spread[root.argmin()] if case.size else torch.zeros((), dtype=F64)
    return {
        "mean": sizes["new"],
        "fresh_sq": fresh,
        "result": torch.stack([sizes["new"].square().sum(), step.square().sum(), smallest]),
    }
