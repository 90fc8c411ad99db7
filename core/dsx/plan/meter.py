"""What each rank does for `dsx.plan.profile.measure`: the same measurements as all others, at the same time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor, nn

from dsx.contracts import Transport
from dsx.defaults.adamw import AdamW
from dsx.defaults.collectives import Collectives
from dsx.launch.distributed import join, leave
from dsx.plan.attention import FusedAttention
from dsx.plan.ledger import Ledger
from dsx.plan.profile import Exchange, Machine, Profile, save
from dsx.plan.reads import Lists

_MOST, _LEAST = 500, 1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_COMMON = (torch.float32, torch.bfloat16)
"""In which models are trained; what is counted in bytes is not told apart by dtype."""
_SMALL = 1 << 16
"""Elements of a message that takes hardly longer than an empty one; from some 64 KiB on, ranks of a host read it."""
_META = torch.device("meta")

Task = Callable[[], object]
Make = Callable[[torch.device], Task]
"""Makes on a device what is to be measured, ready to be called again and again."""


@frozen
class Sizes:
    """Of what is measured: enough to keep a device busy, as training does.

    layers     (rows, inputs, outputs) of linear layers
    attention  (batch, heads, tokens, width of a head)
    rows       and `width` of activations
    weights    elements that are updated
    message    elements of a tensor that travels
    """

    layers: tuple[tuple[int, int, int], ...]
    attention: tuple[int, int, int, int]
    rows: int
    width: int
    weights: int
    message: int


_SIZES: Mapping[str, Sizes] = {
    "cpu": Sizes(((2048, 128, 384), (256, 512, 512)), (2, 8, 256, 64), 512, 512, 1 << 23, 1 << 22),
    "cuda": Sizes(((8192, 2048, 8192), (8192, 4096, 4096)), (4, 32, 2048, 128), 8192, 4096, 1 << 26, 1 << 25),
}


@frozen
class Clock:
    """Times calls that all ranks make at once.

    seconds  to spend on a measurement
    """

    device: torch.device
    transport: Transport
    seconds: float

    def time(self, call: Task) -> float:
        """Seconds of a call when little else disturbs it: the lower quartile of many on a rank, the mean over ranks."""
        call()
        once = self._mean(self._once(call))
        count = max(_LEAST, min(_MOST, int(self.seconds / once)))  # alike on all ranks, as collectives must be
        return self._mean(sorted(self._once(call) for _ in range(count))[count // 4])

    def _once(self, call: Task) -> float:
        self._finish()
        started = time.perf_counter()
        call()
        self._finish()
        return time.perf_counter() - started

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _mean(self, number: float) -> float:
        tensor = torch.tensor([number], dtype=torch.float64)
        self.transport.host().all_reduce(tensor, channel="admin", purpose="admin").wait()
        return float(tensor)


def measure_rank(device: str, seconds: float, file: str, show: bool) -> None:
    """Join the other ranks, measure, and write the profile to `file` on rank 0."""
    ranks = join(torch.device(device))
    place = torch.device(device, ranks.local_rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    try:
        profile = measure_here(place, seconds, show=show and ranks.rank == 0)
        if ranks.rank == 0:
            save([profile], Path(file))
    finally:
        leave(ranks)


def measure_here(device: torch.device, seconds: float, sizes: Sizes | None = None, show: bool = False) -> Profile:
    """The profile of the ranks of the default process group, or of this process alone; entered by all ranks."""
    grouped = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    transport = Collectives(device) if grouped else Transport()
    clock, sizes = Clock(device, transport, seconds), sizes or _SIZES[device.type]
    stages: dict[str, Callable[[Clock, Sizes], Any]] = {
        "flops_per_s": products,
        "moved_per_s": activations,
        "updated_per_s": updates,
        "seconds_per_call": calls,
        "exchange": exchange,
    }
    found = {name: stages[name](clock, sizes) for name in _shown(stages, transport.world, show)}
    transport.close()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    machine = Machine.this(device.type)
    return Profile(machine, device.type, transport.world, torch.get_num_threads(), now, **found)


def products(clock: Clock, sizes: Sizes) -> dict[str, float]:
    """Flops a second by the kinds of `Work.flops`: a linear layer's three products, whose sizes count alike; and
    causal attention."""
    found = {}
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        found[name] = statistics.harmonic_mean([rate(clock, _layer(*layer, dtype), _flops) for layer in sizes.layers])
        found[f"{name} attention"] = rate(clock, _attention(*sizes.attention, dtype), _flops)
    return found


def activations(clock: Clock, sizes: Sizes) -> float:
    """Bytes a second of what lies between products: a norm, a gate, a sum; in dtypes that count alike."""
    paces = [rate(clock, _between(sizes.rows, sizes.width, dtype), _moved) for dtype in _COMMON]
    return statistics.harmonic_mean(paces)


def updates(clock: Clock, sizes: Sizes) -> float:
    """Bytes a second of an update of fp32 weights that are in no cache."""
    return rate(clock, _update(sizes.weights), _moved)


def calls(clock: Clock, sizes: Sizes) -> float:
    """Seconds of an operation of a model that computes next to nothing, forward and backward."""
    return 1 / rate(clock, _small_model, lambda ledger: ledger.calls.total())


def exchange(clock: Clock, sizes: Sizes) -> Exchange | None:
    """Exchanges among the ranks, alone and under a product; None for a single rank."""
    if clock.transport.world == 1:
        return None
    gathered, reduced = zip(*(_paces(clock, sizes.message, dtype) for dtype in _COMMON), strict=True)
    message = statistics.mean(_collectives(clock, _SMALL, torch.float32))
    return Exchange(
        statistics.harmonic_mean(gathered), statistics.harmonic_mean(reduced), message, _overlap(clock, sizes)
    )


def _paces(clock: Clock, size: int, dtype: torch.dtype) -> list[float]:
    """Bytes that leave a rank in a second, of all_gather and of reduce_scatter."""
    world = clock.transport.world
    sent = size // world * (world - 1) * dtype.itemsize
    return [sent / seconds for seconds in _collectives(clock, size, dtype)]


def _collectives(clock: Clock, size: int, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of an all_gather and of a reduce_scatter of so many elements."""
    transport, each = clock.transport, size // clock.transport.world
    whole = torch.zeros(each * transport.world, device=clock.device, dtype=dtype)
    part = torch.zeros(each, device=clock.device, dtype=dtype)
    return (
        clock.time(lambda: transport.all_gather(whole, part, channel="gather", purpose="gather").wait()),
        clock.time(lambda: transport.reduce_scatter(part, whole, channel="reduce", purpose="reduce").wait()),
    )


def _overlap(clock: Clock, sizes: Sizes) -> float:
    """What part of the shorter one a reduction and as long a computation gain, or lose, by running at once."""
    transport, world = clock.transport, clock.transport.world
    whole = torch.zeros(sizes.message // world * world, device=clock.device)
    part = torch.zeros(sizes.message // world, device=clock.device)
    product = _layer(*sizes.layers[-1], torch.float32)(clock.device)

    def reduce(meanwhile: Task = lambda: None) -> None:
        handle = transport.reduce_scatter(part, whole, channel="reduce", purpose="reduce")
        meanwhile()
        handle.wait()

    reducing = clock.time(reduce)
    times = max(1, round(reducing / clock.time(product)))

    def compute() -> None:
        for _ in range(times):
            product()

    computing, both = clock.time(compute), clock.time(lambda: reduce(compute))
    return min(1.0, max(-1.0, (computing + reducing - both) / min(computing, reducing)))


def rate(clock: Clock, make: Make, amount: Callable[[Ledger], float]) -> float:
    """What a call makes of an `amount` in a second, counted on the meta device as plans count it."""
    on_paper = make(_META)
    with FusedAttention(), Lists(), Ledger() as ledger:
        on_paper()
    return amount(ledger) / clock.time(make(clock.device))


def _flops(ledger: Ledger) -> float:
    return ledger.flops.total()


def _moved(ledger: Ledger) -> float:
    return ledger.moved.total()


def _layer(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> Make:
    """A linear layer, forward and backward."""

    def make(device: torch.device) -> Task:
        x = torch.rand(rows, inputs, device=device, dtype=dtype, requires_grad=True)
        weight = torch.rand(outputs, inputs, device=device, dtype=dtype, requires_grad=True)
        gradient = torch.rand(rows, outputs, device=device, dtype=dtype)
        return lambda: torch.autograd.grad(F.linear(x, weight), (x, weight), gradient)

    return make


def _attention(batch: int, heads: int, tokens: int, width: int, dtype: torch.dtype) -> Make:
    """Causal attention, forward and backward."""

    def make(device: torch.device) -> Task:
        shape = (batch, heads, tokens, width)
        q, k, v = (torch.rand(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        gradient = torch.rand(shape, device=device, dtype=dtype)

        def call() -> object:
            return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), gradient)

        return call

    return make


def _between(rows: int, width: int, dtype: torch.dtype) -> Make:
    """What a layer does besides its products, forward and backward."""

    def make(device: torch.device) -> Task:
        x = torch.rand(rows, width, device=device, dtype=dtype, requires_grad=True)
        scale = torch.rand(width, device=device, dtype=dtype, requires_grad=True)
        gradient = torch.rand(rows, width, device=device, dtype=dtype)

        def call() -> object:
            y = F.rms_norm(x, (width,), scale)
            return torch.autograd.grad(x + F.silu(y) * y, (x, scale), gradient)

        return call

    return make


def _update(size: int) -> Make:
    def make(device: torch.device) -> Task:
        weight, gradient, first, second = ([torch.zeros(size, device=device)] for _ in range(4))
        states = {"exp_avg": first, "exp_avg_sq": second}
        return lambda: AdamW().apply(weight, gradient, states, [1], AdamW.hyper)

    return make


def _small_model(device: torch.device) -> Task:
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(8)]
    model = nn.Sequential(*blocks).to(device)
    x = torch.rand(8, 8, device=device)
    parameters = list(model.parameters())

    def call() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).sum(), parameters)

    return call


def _shown(stages: Mapping[str, object], ranks: int, show: bool) -> Any:
    from rich.console import Console
    from rich.progress import track

    words = f"measuring with {ranks} rank{'s' if ranks > 1 else ''}"
    return track(list(stages), words, console=Console(stderr=True), transient=True, disable=not show)
