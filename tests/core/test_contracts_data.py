"""Index arithmetic of pieces, and hyperparameters that cannot change under anybody's hands."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsx.contracts import Flat, Hyper, Job, Piece, Segment, Shard

SLOW, FAST = Hyper(lr=0.1), Hyper(lr=1.0)


def flat(sizes: list[int], groups: list[str] | None = None, align: int = 1, indices: list[int] | None = None) -> Flat:
    """A flat parameter of segments of these sizes, each at a multiple of `align`."""
    segments, at = [], 0
    for number, size in enumerate(sizes):
        index = indices[number] if indices else number
        shape = torch.Size([size])
        segments.append(Segment(f"p{number}", at, at + size, shape, groups[number] if groups else "slow", index))
        at = -(-(at + size) // align) * align
    parameters = tuple(nn.Parameter(torch.zeros(size)) for size in sizes)
    return Flat("unit:float32", torch.float32, torch.float32, True, tuple(segments), parameters, max(at, 1))


def piece(flat: Flat, start: int = 0, stop: int | None = None) -> Piece:
    return Piece(Shard(flat, 0, flat.size, (0, flat.size)), start, flat.size if stop is None else stop)


def job(count: int, unused: frozenset[int] = frozenset(), steps: list[int] | None = None) -> Job:
    used = [index not in unused for index in range(count)]
    return Job({"slow": SLOW, "fast": FAST}, 1.0, used, steps or [1] * count, 1)


def spans(piece: Piece, job: Job, merge: bool = True) -> list[tuple[int, int, int]]:
    """(start, stop, index) of each run."""
    return [(run.where.start, run.where.stop, run.index) for run in piece.runs(job, merge)]


def test_neighbours_are_merged() -> None:
    whole = piece(flat([4, 3, 5]))
    assert spans(whole, job(3)) == [(0, 12, 0)]
    assert spans(whole, job(3), merge=False) == [(0, 4, 0), (4, 7, 1), (7, 12, 2)]


def test_another_group_is_another_run() -> None:
    whole = piece(flat([4, 3, 5], groups=["slow", "fast", "fast"]))
    runs = list(whole.runs(job(3)))
    assert [(run.where, run.hyper) for run in runs] == [(slice(0, 4), SLOW), (slice(4, 12), FAST)]


def test_groups_of_the_same_numbers_are_one_run() -> None:
    same = Job({"slow": Hyper(lr=0.1), "fast": Hyper(lr=0.1)}, 1.0, [True] * 2, [1, 1], 1)
    assert spans(piece(flat([4, 3], groups=["slow", "fast"])), same) == [(0, 7, 0)]


def test_another_count_of_updates_is_another_run() -> None:
    runs = list(piece(flat([4, 3, 5])).runs(job(3, steps=[2, 2, 7])))
    assert [(run.where, run.step) for run in runs] == [(slice(0, 7), 2), (slice(7, 12), 7)]


@pytest.mark.parametrize("merge", [True, False])
def test_the_unused_are_in_no_run_case_35(merge: bool) -> None:
    assert spans(piece(flat([4, 3, 5])), job(3, frozenset({1})), merge) == [(0, 4, 0), (7, 12, 2)]
    assert spans(piece(flat([4, 3, 5])), job(3, frozenset({0, 1, 2})), merge) == []


def test_padding_is_in_no_run() -> None:
    assert spans(piece(flat([4, 8, 3], align=8)), job(3)) == [(0, 4, 0), (8, 19, 1)]


def test_a_cut_piece_has_its_own_coordinates() -> None:
    several = flat([4, 3, 5])
    assert spans(piece(several, 2, 9), job(3), merge=False) == [(0, 2, 0), (2, 5, 1), (5, 7, 2)]
    assert spans(piece(several, 5, 6), job(3)) == [(0, 1, 1)]
    assert len(piece(several, 2, 9)) == 7


def test_a_piece_of_padding_alone_has_no_run() -> None:
    padded = piece(flat([4, 8], align=8), 4, 8)
    assert spans(padded, job(2)) == []
    assert list(padded.places()) == []


def test_empty_parameters_are_in_no_run_case_20() -> None:
    assert spans(piece(flat([4, 0, 3])), job(3), merge=False) == [(0, 4, 0), (4, 7, 2)]
    assert [number for number, _ in piece(flat([4, 0, 3])).places()] == [0, 2]


def test_indices_are_those_of_the_model() -> None:
    several = flat([2, 2], indices=[3, 1])
    assert spans(piece(several), job(4, frozenset({3}))) == [(2, 4, 1)]
    assert [(number, segment.index) for number, segment in piece(several, 2).places()] == [(1, 1)]


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    align=st.sampled_from([1, 4, 8]),
    cuts=st.lists(st.integers(0, 80), max_size=4),
    data=st.data(),
)
def test_pieces_cover_the_used_elements_once(
    sizes: list[int], align: int, cuts: list[int], data: st.DataObject
) -> None:
    """However a flat parameter is cut and whatever is merged: each used element once, with its own numbers."""
    count = len(sizes)
    groups = data.draw(st.lists(st.sampled_from(["slow", "fast"]), min_size=count, max_size=count))
    unused = data.draw(st.frozensets(st.integers(0, count - 1)))
    work = job(count, unused, data.draw(st.lists(st.integers(1, 2), min_size=count, max_size=count)))
    whole = flat(sizes, groups, align)
    bounds = sorted({0, whole.size, *(cut for cut in cuts if cut < whole.size)})
    for merge in (True, False):
        found = {}
        for start, stop in pairwise(bounds):
            for run in piece(whole, start, stop).runs(work, merge):
                for at in range(run.where.start, run.where.stop):
                    assert start + at not in found
                    found[start + at] = (run.hyper, run.step)
        assert found == {
            at: (work.hypers[segment.group], work.steps[segment.index])
            for segment in whole.segments
            if work.used[segment.index]
            for at in range(segment.start, segment.stop)
        }


def test_parts_of_ranks_cover_a_flat_parameter() -> None:
    whole = flat([64, 32], align=32)
    assert [whole.part(rank, 3) for rank in range(3)] == [(0, 32), (32, 64), (64, 96)]


def test_parameters_become_views() -> None:
    whole = flat([4, 3], align=8)
    live = torch.arange(float(whole.size))
    whole.attach(live)
    live += 1
    assert [parameter.tolist() for parameter in whole.parameters] == [[1, 2, 3, 4], [9, 10, 11]]


def test_a_shard_is_one_piece() -> None:
    shard = Shard(flat([8]), 2, 6, (2, 6))
    assert (shard.piece().start, shard.piece().stop, shard.key) == (2, 6, "unit:float32")


def test_hyper_reads_both_ways() -> None:
    hyper = Hyper({"lr": 0.1}, betas=(0.9, 0.999))
    assert hyper.lr == hyper["lr"] == 0.1
    assert dict(hyper) == {"lr": 0.1, "betas": (0.9, 0.999)}
    assert repr(hyper) == "Hyper(lr=0.1, betas=(0.9, 0.999))"


def test_hyper_is_frozen() -> None:
    with pytest.raises(AttributeError, match=r"frozen; make a new one: hyper.replace\(lr=...\)"):
        SLOW.lr = 2.0
    with pytest.raises(TypeError):
        SLOW["lr"] = 2.0
    source = {"lr": 0.1}
    hyper = Hyper(source)
    source["lr"] = 9.0
    assert hyper.lr == 0.1


def test_hyper_names_what_it_has() -> None:
    with pytest.raises(AttributeError, match="no hyperparameter 'momentum' among lr, eps"):
        _ = Hyper(lr=0.1, eps=1e-8).momentum


def test_hyper_replaces_into_a_new_one() -> None:
    hyper = Hyper(lr=0.1, eps=1e-8)
    assert hyper.replace(lr=0.2) == Hyper(lr=0.2, eps=1e-8)
    assert hyper.lr == 0.1


@pytest.mark.parametrize("travel", [lambda hyper: pickle.loads(pickle.dumps(hyper)), copy.copy, copy.deepcopy])
def test_hyper_travels(travel: Any) -> None:
    hyper = Hyper(lr=0.1, betas=(0.9, 0.999))
    assert travel(hyper) == hyper
    assert travel(hyper).lr == 0.1


def test_hypers_are_keys() -> None:
    assert {Hyper(lr=0.1): 1}[Hyper(lr=0.1)] == 1
    assert Hyper(lr=0.1) != Hyper(lr=0.2)
    assert Hyper(lr=0.1) != {"lr": 0.1}
    assert {Hyper(lr=0.1, eps=1.0): 1}[Hyper(eps=1.0, lr=0.1)] == 1


def test_a_job_is_frozen() -> None:
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        job(1).multiplier = 2.0  # type: ignore[misc]
