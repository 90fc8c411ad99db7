"""Kernels against the time that this GPU takes to move the same bytes; the engine's step against a plain loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dsx
from device.engine import CLIP, Loss, manifest
from device.kernels import operation_of
from device.part import Checks, Figures
from dsx_kernels.choice import REFERENCE
from dsx_text import gpt
from kernels.cases import ADAMW, BF16, F32, KEYS, OUTPUTS, SGD, TABLE, Case, call

SIZES = {"cuda": (100_000, 10_000_000, 100_000_000), "cpu": (100_000,)}
ROUNDS, CALLS = 15, 10

_STATES = {"master": F32, "exp_avg": F32, "exp_avg_sq": F32, "max_exp_avg_sq": None}
_PLAIN = {"maximize": False, "multiplier": 1.0, "clip_value": None}
_ADAMW = {**ADAMW, **_PLAIN}
_SGD = {**SGD, **_PLAIN, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.01, "nesterov": False}

CASES = (
    Case("squares", {"tensor": F32}, 0),
    Case("squares", {"tensor": BF16}, 0),
    Case("adamw", {"gradient": F32, **_STATES, "param": None}, 0, _ADAMW),
    Case("adamw", {"gradient": BF16, **_STATES, "param": BF16}, 0, _ADAMW),
    Case("sgd", {"gradient": BF16, "master": F32, "momentum_buffer": F32, "param": BF16}, 0, _SGD),
    Case("cast", {"source": F32, "target": BF16}, 0),
    Case("cast", {"source": BF16, "target": F32}, 0),
    Case("accumulate", {"into": F32, "source": BF16}, 0, {"scale": 0.5}),
    next(case for case in TABLE["lamb"] if case.tensors["mean"] == F32),
)
"""What is timed, at each of the sizes."""


def checks(device: str, argument: str | None) -> Checks:
    rate = _bandwidth(device, SIZES[device][-1])
    yield "a copy, bytes read and written", lambda: {"GB/s": round(rate / 1e9, 1)}
    for size in SIZES[device]:
        for case in CASES:
            dtypes = "-".join(str(dtype).removeprefix("torch.") for dtype in case.tensors.values() if dtype)
            words = f"{case.operation} {dtypes}, {size:.0e} elements"
            yield words, partial(_compare, replace(case, size=size), device, rate)
    for precision in ("fp32", "bf16"):
        yield f"a step of a GPT, {precision}", partial(_step, precision, device)


def _bandwidth(device: str, size: int) -> float:
    """Bytes a second of a copy: the best that is seen."""
    source, target = (torch.rand(size, device=device) for _ in range(2))
    return 8 * size / min(times(lambda: target.copy_(source), device))


def _compare(case: Case, device: str, rate: float) -> Figures:
    """Microseconds of each implementation, in the order of choice, and the share of the bandwidth that ours use."""
    tensors = {name: torch.rand(case.size, device=device).to(dtype) for name, dtype in case.tensors.items() if dtype}
    key = tensors[KEYS[case.operation]]
    runs: dict[str, Callable[[], Any]] = {
        implementation.name: partial(call, implementation.load(), case, tensors)
        for implementation in operation_of(case.operation).implementations()
        if implementation.why_not(device, key.dtype) is None
    }
    if case.operation in _TORCHS:
        runs["torch"] = partial(_TORCHS[case.operation], tensors)
    found = {name: statistics.median(times(run, device)) for name, run in runs.items()}
    words = {f"{name} us": round(1e6 * seconds, 1) for name, seconds in found.items()}
    bound = _moved(case, tensors) / rate
    shares = {f"bandwidth used by {name}": round(bound / found[name], 3) for name in found if name not in _OTHERS}
    return {**words, **shares}


def _moved(case: Case, tensors: Mapping[str, Tensor]) -> int:
    """The fewest bytes that are read and written."""
    read = sum(tensor.nbytes for name, tensor in tensors.items() if name not in ("param", "target"))
    return read + sum(tensor.nbytes for name, tensor in tensors.items() if name in OUTPUTS.get(case.operation, ()))


_OTHERS = (REFERENCE, "torch")
"""Ways that are not bound by memory alone."""


def _torch_squares(tensors: Mapping[str, Tensor]) -> Any:
    tensor = tensors["tensor"]
    return tensor.isfinite().all(), torch.linalg.vector_norm(tensor)


def _torch_adamw(tensors: Mapping[str, Tensor]) -> None:
    master = tensors["master"]
    torch._fused_adamw_(
        [master],
        [tensors["gradient"].to(master.dtype)],
        [tensors["exp_avg"]],
        [tensors["exp_avg_sq"]],
        [],
        [torch.ones((), device=master.device)],
        lr=1e-2,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.1,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    )
    if "param" in tensors:
        tensors["param"].copy_(master)


_TORCHS: Mapping[str, Callable[[Mapping[str, Tensor]], Any]] = {"squares": _torch_squares, "adamw": _torch_adamw}
"""What a plain program would call for the same result."""


def _step(precision: str, device: str) -> Figures:
    """Milliseconds of an update with clipping: dsx, and a plain loop of fused AdamW, under autocast for bf16."""
    big = device == "cuda"
    ids = torch.randint(0, 256, (8, 512) if big else (2, 32), device=device)
    size: dict[str, Any] = {"layers": 12, "width": 768, "heads": 12} if big else {"layers": 2, "width": 64, "heads": 4}

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Loss(gpt(vocab=256, context=512, **size)).to(device)

    engine = dsx.prepare(make(), manifest("replicated", precision={"use": [precision]}))
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def ours() -> None:
        engine.backward(engine(ids))
        engine.step()

    def plain() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = model(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    mine, plains = (statistics.median(times(run, device, 5, 3)) for run in (ours, plain))
    engine.close()
    return {"dsx ms": round(1e3 * mine, 2), "plain ms": round(1e3 * plains, 2), "ratio": round(mine / plains, 3)}


def times(run: Callable[[], Any], device: str, rounds: int = ROUNDS, calls: int = CALLS) -> list[float]:
    """Seconds of a call, of each round, after what the first calls compile."""
    for _ in range(3):
        run()
    return [_time(run, device, calls) for _ in range(rounds)]


def _time(run: Callable[[], Any], device: str, calls: int) -> float:
    if device != "cuda":
        started = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - started) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
