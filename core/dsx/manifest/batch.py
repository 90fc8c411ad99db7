"""How many samples a step takes: global = micro x accumulation x world size."""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from dsx.errors import ManifestError, Problem
from dsx.manifest.read import Origin
from dsx.manifest.schema import BatchKeys


@frozen
class Batch:
    """Samples of one optimizer step, for one world size.

    global_        samples per step over all ranks; None: unknown until the data gives a micro-batch
    micro          samples per rank and forward pass; None likewise
    accumulation   micro-batches per step
    """

    global_: int | None
    micro: int | None
    accumulation: int


def resolve(keys: BatchKeys, world: int, origin: Callable[[str], Origin]) -> Batch:
    """The batch that the given keys mean on `world` ranks.

    Two keys determine the third. `global` alone or `micro` alone means no accumulation. `origin` says where a key was
    given ("batch.micro"). ManifestError, with the nearest values that fit, if they contradict each other or do not
    come out even.
    """
    assert world > 0, world
    micro, accumulation = keys.micro, keys.accumulation
    if keys.global_ is None:
        accumulation = accumulation or 1
        return Batch(None if micro is None else micro * accumulation * world, micro, accumulation)
    per_rank, left = divmod(keys.global_, world)
    if micro is None:
        accumulation = accumulation or 1
        micro = per_rank // accumulation
    elif accumulation is None:
        accumulation = per_rank // micro
    if left or micro * accumulation != per_rank:
        raise ManifestError([_conflict(keys, keys.global_, world, origin)])
    return Batch(keys.global_, micro, accumulation)


def _conflict(keys: BatchKeys, global_: int, world: int, origin: Callable[[str], Origin]) -> Problem:
    micro, accumulation = keys.micro, keys.accumulation
    known = (micro or 1) * (accumulation or 1) * world
    micro_text = str(micro or f"{global_ / known:g} (derived)")
    accumulation_text = str(accumulation or (f"{global_ / known:g} (derived)" if micro else "1 (the default)"))
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    what = f"global {global_}, micro {micro_text} and accumulation {accumulation_text} do not fit {ranks}"
    if micro and accumulation:
        what += f": {micro} x {accumulation} x {world} = {known}"
    fits = f"global = micro x accumulation x world size, as with {' or '.join(_proposals(keys, global_, world))}"
    place = origin("batch.global")
    return Problem("batch.global", what, fits, file="--set" if place.kind == "--set" else place.file, line=place.line)


def _proposals(keys: BatchKeys, global_: int, world: int) -> list[str]:
    """Changes of one value each that make the batch fit."""
    micro, accumulation = keys.micro, keys.accumulation
    known = (micro or 1) * (accumulation or 1) * world
    below = global_ // known * known
    fits = [known] if micro and accumulation else [value for value in (below, below + known) if value]
    texts = [f"global = {value}" for value in fits]
    per_rank, left = divmod(global_, world)
    if left:
        return texts
    for name, value, other in (("micro", micro, accumulation), ("accumulation", accumulation, micro)):
        if value and other and per_rank % other == 0:
            texts.append(f"{name} = {per_rank // other}")
        elif value and not other:
            texts.append(f"{name} = {_divisor(per_rank, value)}")
    return texts


def _divisor(number: int, most: int) -> int:
    """The largest divisor of `number` up to `most`: more would need more memory than was asked for."""
    return next(n for n in range(min(number, most), 0, -1) if number % n == 0)
