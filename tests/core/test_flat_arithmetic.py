"""Laws that hold from a model to what every rank updates: real cuts of random models, on any world, with any block."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random

import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsx.contracts import ALIGNMENT, Dtypes, Flat, Groups, Hyper, Job, Piece, Run, Shard, Unit, fill_buckets
from dsx.units import flatten, trainable

Span = tuple[int, int]

RATES = (0.1, 0.1, 1.0)
"""Of three groups: two have the same numbers, so that their parameters may share a run."""

aligned = st.sampled_from([(0,), (32,), (2, 16), (64,), (1, 96)])
shapes = st.one_of(
    st.sampled_from([(), (4, 0), (1, 17), (1, 1)]),
    aligned,
    st.lists(st.integers(0, 12), max_size=3).map(tuple),
    st.integers(1, 300).map(lambda size: (size,)),
)
floats = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16])
counts = st.sampled_from([torch.uint8, torch.int8, torch.int64, torch.bool])
blocks = st.one_of(st.sampled_from([1, 2, 16, 32, 64]), st.integers(1, 1024))


@st.composite
def models(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = shapes) -> nn.Module:
    """A rest and up to three blocks, of parameters of few kinds, at least one of them trained."""
    first, *more = draw(st.lists(floats, min_size=1, max_size=2)), draw(floats), draw(counts)
    kinds = st.sampled_from([*((dtype, True) for dtype in first), *((dtype, False) for dtype in more)])
    parameter = st.builds(lambda shape, kind: nn.Parameter(torch.zeros(shape, dtype=kind[0]), kind[1]), shapes, kinds)
    several = st.lists(parameter, min_size=1, max_size=8).map(nn.ParameterList)
    model = nn.Module()
    model.rest = draw(several)
    model.rest.append(nn.Parameter(torch.zeros(draw(shapes), dtype=first[0])))
    model.blocks = nn.ModuleList(draw(st.lists(several, max_size=3)))
    return model


class Thirds(Groups):
    """Parameters take turns in three groups."""

    def __init__(self) -> None:
        self._count = 0

    def assign(self, name: str, parameter: nn.Parameter) -> str:
        self._count += 1
        return str(self._count % len(RATES))


@frozen
class Cut:
    """A model as one world sees it."""

    model: nn.Module
    world: int
    block: int
    units: tuple[Unit, ...]

    @classmethod
    def of(cls, model: nn.Module, world: int, block: int, limit: int | None = None) -> Cut:
        units = flatten(model, dtypes=Dtypes(), groups=Thirds(), world=world, block=block, limit_bytes=limit)
        return cls(model, world, block, units)

    @property
    def align(self) -> int:
        return math.lcm(ALIGNMENT, self.block)

    @property
    def flats(self) -> list[Flat]:
        return [flat for unit in self.units for flat in unit.flats]

    @property
    def updated(self) -> list[Flat]:
        return [flat for flat in self.flats if flat.trainable]

    def shard(self, flat: Flat, rank: int) -> Shard:
        part = flat.part(rank, self.world)
        return Shard(flat, *part, part)


limit_sizes = st.one_of(st.integers(0, 2000), st.integers(0, 20).map(lambda count: 64 * count))
limits = st.one_of(st.none(), limit_sizes)
room = st.one_of(st.integers(0, 20_000), st.integers(0, 40).map(lambda count: 256 * count))
sizes = st.sampled_from([3, 100, 10_000])
cuts = st.builds(Cut.of, models(), st.integers(1, 9), blocks, limits)
laws = settings(deadline=None)


def joined(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, those that touch made one; fails where two overlap."""
    whole: list[Span] = []
    for start, stop in sorted(spans):
        assert not whole or whole[-1][1] <= start, "two spans overlap"
        if whole and whole[-1][1] == start:
            start = whole.pop()[0]
        whole.append((start, stop))
    return whole


@st.composite
def jobs(draw: st.DrawFn, cut: Cut) -> Job:
    """Most parameters are used, and have been as often as others."""
    count = len(trainable(cut.model))
    unused, late = (draw(st.sets(st.integers(0, count - 1), max_size=count // 3)) for _ in range(2))
    hypers = {str(number): Hyper(lr=rate) for number, rate in enumerate(RATES)}
    used = [number not in unused for number in range(count)]
    return Job(hypers, 1.0, used, [1 if number in late else 2 for number in range(count)], 2)


def pieces(cut: Cut, flat: Flat, size: int) -> Iterator[Piece]:
    """All ranks' shards as a stepper may give them to a rule: cut at every `size` blocks."""
    for rank in range(cut.world):
        shard = cut.shard(flat, rank)
        for start in range(shard.start, shard.stop, size * cut.block):
            yield Piece(shard, start, min(start + size * cut.block, shard.stop))


@laws
@given(cuts)
def test_parts_of_all_ranks_tile_a_flat_parameter_at_multiples_of_the_block(cut: Cut) -> None:
    for flat in cut.flats:
        parts = [flat.part(rank, cut.world) for rank in range(cut.world)]
        assert joined(parts) == [(0, flat.size)]
        assert {stop - start for start, stop in parts} == {flat.size // cut.world}
        assert all(bound % cut.align == 0 for part in parts for bound in part)


@laws
@given(models(), blocks, limits, st.integers(2, 9))
def test_only_the_end_of_a_flat_parameter_depends_on_the_world(
    model: nn.Module, block: int, limit: int | None, world: int
) -> None:
    """A checkpoint and a second world size agree on where a parameter lies."""
    alone, several = Cut.of(model, 1, block, limit), Cut.of(model, world, block, limit)
    assert [flat.key for flat in alone.flats] == [flat.key for flat in several.flats]
    for one, other in zip(alone.flats, several.flats, strict=True):
        assert one.segments == other.segments
        assert 0 <= other.size - one.size < world * alone.align


@laws
@given(cuts)
def test_padding_is_no_more_than_alignment_asks_for(cut: Cut) -> None:
    for flat in cut.flats:
        for segment, following in pairwise(flat.segments):
            assert following.start % cut.align == 0
            assert 0 <= following.start - segment.stop < cut.align
        assert 0 <= flat.size - max(flat.segments[-1].stop, 1) < cut.align * cut.world


@laws
@given(st.builds(Cut.of, models(), st.integers(1, 9), st.integers(1, 64), limits))
def test_what_is_written_to_parameters_is_in_no_padding(cut: Cut) -> None:
    """Parameters are views: together they are every element of their segments, and none besides."""
    for flat in cut.flats:
        live = torch.zeros(flat.size, dtype=flat.dtype)
        flat.attach(live)
        for segment, parameter in zip(flat.segments, flat.parameters, strict=True):
            assert parameter.shape == segment.shape
            assert not parameter.any(), "two parameters share elements"
            with torch.no_grad():
                parameter.fill_(1)
        assert live.count_nonzero() == sum(parameter.numel() for parameter in flat.parameters)


@laws
@given(models(), limit_sizes)
def test_a_limit_fills_each_flat_parameter_as_far_as_it_goes(model: nn.Module, limit: int) -> None:
    """And no further: whole parameters in the model's order; the first of the next one would not have fitted."""
    order = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    for unit in Cut.of(model, 1, 1, limit).units:
        assert all(len(flat.segments) == 1 or _bytes(flat.parameters) <= limit for flat in unit.flats)
        for flat, following in pairwise(unit.flats):
            if (flat.dtype, flat.trainable) == (following.dtype, following.trainable):
                assert _bytes(flat.parameters) + _bytes(following.parameters[:1]) > limit
                assert order[flat.segments[-1].name] < order[following.segments[0].name]


def _bytes(parameters: Sequence[nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@laws
@given(cuts, sizes, st.data())
def test_runs_of_all_ranks_cover_each_used_parameter_once(cut: Cut, size: int, data: st.DataObject) -> None:
    """Whatever the ranks' parts and pieces: its elements once, its numbers on each; nothing else is touched."""
    job = data.draw(jobs(cut))
    for flat in cut.updated:
        spans: dict[int, list[Span]] = {}
        groups = {segment.index: segment.group for segment in flat.segments}
        for piece in pieces(cut, flat, size):
            for run in piece.runs(job, merge=False):
                start, stop = piece.start + run.where.start, piece.start + run.where.stop
                spans.setdefault(run.index, []).append((start, stop))
                assert (run.hyper, run.step) == (job.hypers[groups[run.index]], job.steps[run.index])
        used = [segment for segment in flat.segments if job.used[segment.index] and segment.start < segment.stop]
        assert {index: joined(parts) for index, parts in spans.items()} == {
            segment.index: [(segment.start, segment.stop)] for segment in used
        }


@laws
@given(st.builds(Cut.of, models(aligned), st.integers(1, 3), st.sampled_from([1, 3, 32])), sizes, st.data())
def test_merged_runs_say_what_unmerged_ones_do_in_as_few_as_can_be(cut: Cut, size: int, data: st.DataObject) -> None:
    """Parameters of whole alignments touch, so that there is something to merge."""
    job = data.draw(jobs(cut))
    for flat in cut.updated:
        for piece in pieces(cut, flat, size):
            merged, single = numbered(piece.runs(job)), numbered(piece.runs(job, merge=False))
            assert merged == {numbers: joined(spans) for numbers, spans in single.items()}


def numbered(runs: Iterable[Run]) -> dict[tuple[Hyper, int], list[Span]]:
    """Spans of the runs, by the numbers they are updated with."""
    spans: dict[tuple[Hyper, int], list[Span]] = {}
    for run in runs:
        spans.setdefault((run.hyper, run.step), []).append((run.where.start, run.where.stop))
    return spans


@laws
@given(cuts)
def test_places_are_the_parameters_that_a_piece_has_elements_of(cut: Cut) -> None:
    count = len(trainable(cut.model))
    hypers = {str(number): Hyper() for number in range(len(RATES))}
    job = Job(hypers, 1.0, [True] * count, [1] * count, 1)
    for flat in cut.updated:
        for rank in range(cut.world):
            piece = cut.shard(flat, rank).piece()
            assert [segment.index for _, segment in piece.places()] == [r.index for r in piece.runs(job, merge=False)]
            assert all(flat.segments[number] is segment for number, segment in piece.places())


@laws
@given(cuts, room, st.integers(1, 2))
def test_buckets_hold_every_flat_parameter_once_in_the_order_of_backward(
    cut: Cut, limit: int, accumulation: int
) -> None:
    flats, dtypes = cut.updated, Dtypes()
    buckets = fill_buckets(flats, dtypes, accumulation, limit, lambda bucket: torch.zeros(bucket.size))
    assert [slot.flat for bucket in buckets for slot in bucket.slots] == flats[::-1]
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    for bucket in buckets:
        assert {dtypes.accumulate(slot.flat.dtype, accumulation) for slot in bucket.slots} == {bucket.dtype}
        assert joined((slot.start, slot.start + slot.flat.size) for slot in bucket.slots) == [(0, bucket.size)]
        assert bucket.size % (cut.world * cut.align) == 0
        assert len(bucket.slots) == 1 or bucket.size * bucket.dtype.itemsize <= limit
    for bucket, following in pairwise(buckets):
        more = (bucket.size + following.slots[0].flat.size) * bucket.dtype.itemsize
        assert bucket.dtype != following.dtype or more > limit


@laws
@given(st.builds(Cut.of, models(), st.integers(1, 4), st.integers(1, 64), limits), room, st.randoms())
def test_gradients_fall_into_places_of_their_own(cut: Cut, limit: int, random: Random) -> None:
    """A complete bucket is the gradients that came, zeros for those that did not, and padding that nobody wrote."""
    for bucket in fill_buckets(
        cut.updated, Dtypes(), 1, limit, lambda bucket: torch.zeros(bucket.size, dtype=bucket.dtype)
    ):
        buffer, came = bucket.memory(), 0
        for slot in bucket.slots:
            for number, segment in enumerate(slot.flat.segments):
                view = slot.view(number, buffer)
                assert view.shape == segment.shape
                assert not view.any(), "two gradients share elements"
                view.fill_(1)
                if random.random() < 0.5:
                    slot.fresh.add(number)
                    came += view.numel()
        assert bucket.complete() is buffer
        assert buffer.count_nonzero() == came
        assert all(torch.equal(slot.whole, buffer[slot.start : slot.start + slot.flat.size]) for slot in bucket.slots)
