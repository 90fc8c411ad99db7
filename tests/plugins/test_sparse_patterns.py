"""Every pattern against a mask of tokens written from its paper's definition, one pair at a time."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dsx.errors import DsxError, ManifestError
from dsx_sparse.chance import drawn
from dsx_sparse.groups import NAMES
from dsx_sparse.layout import layout
from dsx_sparse.region import Shape, between, blocks

Pair = Callable[[int, int, int], bool]
"""(head, position of the query, key) -> may attend, before causality."""


def options(name: str, **given: Any) -> Any:
    return importlib.import_module(f"dsx_sparse.{name}").Options(**given)


def made(name: str, shape: Shape, **given: Any) -> Tensor:
    pattern = options(name, block=shape.block, **given)
    pattern.check()
    return layout(shape, pattern.region(shape)).mask()


def brute(shape: Shape, pair: Pair) -> Tensor:
    offset = shape.keys - shape.queries
    rows = [
        [
            [pair(head, p, j) and (not shape.causal or j <= p) for j in range(shape.keys)]
            for p in range(offset, shape.keys)
        ]
        for head in range(shape.heads)
    ]
    return torch.tensor(rows, dtype=torch.bool).reshape(shape.heads, shape.queries, shape.keys)


def _fixed(shape: Shape, local: int, summary: int, patterns: int = 1, horizontal: bool = False) -> Pair:
    """DeepSpeed's loops over blocks, with the first row of a summary's column left to causality."""
    count = shape.columns
    marks = []
    for head in range(shape.heads):
        columns: set[int] = set()
        first = local - (1 + head % patterns) * summary
        end = count - count % local
        for start in range(first, end, local):
            columns.update(range(start, start + summary))
        if end < count:
            start = max(0, min(end + first, count - summary))
            columns.update(range(start, start + summary))
        marks.append(columns)

    def pair(head: int, p: int, j: int) -> bool:
        row, column = p // shape.block, j // shape.block
        wide = horizontal and not shape.causal and row in marks[head]
        return row // local == column // local or column in marks[head] or wide

    return pair


def _variable(shape: Shape, local: list[int], starts: list[int], ends: list[int], horizontal: bool) -> Pair:
    group: list[int] = []
    while len(group) < shape.columns:
        number = group[-1] + 1 if group else 0
        group += [number] * local[min(number, len(local) - 1)]
    seen = {block for start, end in zip(starts, ends, strict=True) for block in range(start, end)}

    def pair(head: int, p: int, j: int) -> bool:
        row, column = p // shape.block, j // shape.block
        wide = horizontal and not shape.causal and row in seen
        return group[row] == group[column] or column in seen or wide

    return pair


def _in_blocks(shape: Shape, pair: Callable[[int, int], bool]) -> Pair:
    return lambda head, p, j: pair(p // shape.block, j // shape.block)


DEFINITIONS: dict[str, tuple[dict[str, Any], Callable[[Shape], Pair]]] = {
    "dense": ({}, lambda s: lambda h, p, j: True),
    "sliding_window": ({"window": 21}, lambda s: lambda h, p, j: abs(p - j) < 21),
    "sliding_window of one": ({"window": 1}, lambda s: lambda h, p, j: p == j),
    "local_blocks": (
        {"before": 2, "after": 1},
        lambda s: _in_blocks(s, lambda r, c: r - 2 <= c <= r + 1),
    ),
    "global_blocks": (
        {"starts": (0, 3, 90), "ends": (1, 5, 91), "horizontal": True},
        lambda s: _in_blocks(s, lambda r, c: r in (0, 3, 4) or c in (0, 3, 4)),
    ),
    "strided": ({"stride": 3}, lambda s: _in_blocks(s, lambda r, c: abs(r - c) <= 3 or (r - c) % 3 == 0)),
    "dilated": (
        {"reach": 3, "dilation": 2},
        lambda s: _in_blocks(s, lambda r, c: abs(r - c) in (0, 2, 4)),
    ),
    "global_local": (
        {"window": 9, "starts": (0, 40), "ends": (2, 41)},
        lambda s: lambda h, p, j: abs(p - j) < 9 or p in (0, 1, 40) or j in (0, 1, 40),
    ),
    "streaming": ({"sinks": 5, "recent": 30}, lambda s: lambda h, p, j: j < 5 or abs(p - j) < 30),
    "fixed": ({"local": 3, "summary": 1}, lambda s: _fixed(s, 3, 1)),
    "fixed of several": (
        {"local": 4, "summary": 2, "patterns": 2, "horizontal": True},
        lambda s: _fixed(s, 4, 2, 2, True),
    ),
    "variable": (
        {"local": (1, 2), "starts": (0, 2), "ends": (1, 4), "horizontal": True},
        lambda s: _variable(s, [1, 2], [0, 2], [1, 4], True),
    ),
}


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_pattern_is_its_definition(name: str, causal: bool, block: int) -> None:
    given, define = DEFINITIONS[name]
    for length in (0, 1, 17, 64, 99):
        shape = Shape(2, length, length, block, causal)
        expected = brute(shape, define(shape))
        assert torch.equal(made(name.partition(" ")[0], shape, **given), expected), length


@pytest.mark.parametrize("name", DEFINITIONS)
def test_after_a_cache_of_keys_queries_are_the_last_positions(name: str) -> None:
    given, define = DEFINITIONS[name]
    for queries in (1, 19, 40):
        shape = Shape(2, queries, 83, 16, True)
        assert torch.equal(made(name.partition(" ")[0], shape, **given), brute(shape, define(shape))), queries


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_bigbird_is_a_window_and_globals_and_so_many_random_blocks(causal: bool) -> None:
    shape = Shape(3, 200, 200, 16, causal)
    found = _blocks(made("bigbird", shape, window=3, globals=2, random=2, seed=5), 16)
    row, column = torch.arange(13)[:, None], torch.arange(13)
    certain = (row - column).abs() <= 1
    certain = certain | (column < 2) | (row < 2)
    certain = certain & (column <= row) if causal else certain
    assert bool(found[:, certain].all())
    extra = (found & ~certain).sum(-1)
    assert int(extra.max()) <= 2 and int(extra.sum()) > 10
    assert not torch.equal(found[0], found[1]), "heads draw alike"
    assert torch.equal(found, _blocks(made("bigbird", shape, window=3, globals=2, random=2, seed=5), 16))
    assert not torch.equal(found, _blocks(made("bigbird", shape, window=3, globals=2, random=2, seed=6), 16))
    same = made("bigbird", shape, window=3, globals=2, random=2, seed=5, per_head=False)
    assert torch.equal(same[0], same[2])


def test_the_draw_is_even_and_knows_nothing_of_the_process() -> None:
    torch.manual_seed(1)
    random.seed(1)
    first = drawn(40, 5, 200, 3, causal=False)
    torch.manual_seed(2)
    assert torch.equal(first, drawn(40, 5, 200, 3, causal=False))
    assert bool((first.sum(-1) == 5).all())
    assert bool(((first.float().mean(0) - 5 / 40).abs() < 0.12).all())
    causal = drawn(40, 5, 3, 3, causal=True)
    assert torch.equal(causal.sum(-1), torch.arange(1, 41).clamp(max=5).expand(3, -1))
    assert not bool(causal.triu(1).any())


def test_variable_draws_random_blocks_besides() -> None:
    shape = Shape(2, 256, 256, 16, False)
    without = _blocks(made("variable", shape, local=(2,)), 16)
    found = _blocks(made("variable", shape, local=(2,), random=3, per_head=True), 16)
    assert bool((found | ~without).all()) and not torch.equal(found[0], found[1])
    assert torch.equal(found, without | drawn(16, 3, 2, 0, causal=False))


def test_mixed_gives_each_group_of_heads_the_union_of_its_patterns() -> None:
    groups = (
        {"heads": 1, "use": ("sliding_window", "global_blocks"), "options": {"sliding_window": {"window": 7}}},
        {"heads": 2, "use": ("fixed",), "options": {"fixed": {"local": 4, "patterns": 2}}},
        {"use": ("dense",)},
    )
    mixed = importlib.import_module("dsx_sparse.mixed")
    given = tuple(mixed.Group(**group) for group in groups)
    for causal in (False, True):
        shape = Shape(5, 90, 90, 16, causal)
        fixed = _fixed(Shape(2, 90, 90, 16, causal), 4, 1, 2)

        def pair(head: int, p: int, j: int, fixed: Pair = fixed) -> bool:
            if head == 0:
                return abs(p - j) < 7 or j // 16 == 0
            return fixed(head - 1, p, j) if head < 3 else True

        assert torch.equal(made("mixed", shape, groups=given), brute(shape, pair))
    with pytest.raises(DsxError, match="do not make up the 2 heads"):
        made("mixed", Shape(2, 90, 90, 16, False), groups=given)


def test_documents_see_themselves_within_a_pattern() -> None:
    ids = torch.tensor([[0] * 30 + [1] * 3 + [2] * 37, [5] * 70])
    shape = Shape(2, 70, 70, 16, True)
    pattern = options("document", block=16, use=("sliding_window",), options={"sliding_window": {"window": 20}})
    pattern.check()
    found = layout(shape, pattern.region(shape), ids).mask()
    for row, document in enumerate(ids.tolist()):
        expected = brute(shape, lambda h, p, j, d=document: d[p] == d[j] and abs(p - j) < 20)
        assert torch.equal(found[row], expected)


def test_regions_are_an_algebra() -> None:
    shape = Shape(2, 70, 70, 16, False)
    here = shape.positions()
    band, sinks = between(shape, here - 9, here + 4), between(shape, here * 0, here * 0 + 20)
    heads = blocks(shape, torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(0)) > 0.5)
    masks = [layout(shape, region).mask() for region in (band, sinks, heads)]
    assert torch.equal(layout(shape, (band | sinks) & heads).mask(), (masks[0] | masks[1]) & masks[2])
    assert torch.equal(layout(shape, band & sinks | heads).mask(), masks[0] & masks[1] | masks[2])


def test_whole_blocks_carry_no_condition_and_empty_ones_are_not_listed() -> None:
    shape = Shape(1, 256, 256, 32, True)
    found = layout(shape, options("sliding_window", window=64).region(shape))
    assert found.columns.tolist() == [0, 0, 1, *[c for row in range(2, 8) for c in (row - 2, row - 1, row)]]
    assert sorted(set(found.kinds.tolist())) == [0, 1, 8]
    assert len(found.bits) == 1, "alike blocks share their mask"
    shape = Shape(1, 64, 64, 16, False)
    cautious = between(shape, shape.positions() // 16 * 16, shape.positions() // 16 * 16 + shape.positions() % 2)
    assert layout(shape, cautious).columns.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("fixed", {"local": 4, "summary": 3}, "a divisor of local = 4"),
        ("fixed", {"local": 4, "summary": 2, "patterns": 3}, "at most local / summary = 2"),
        ("variable", {"local": ()}, "at least one group"),
        ("variable", {"starts": (0, 4), "ends": (1,)}, "one for each of the 2 starts"),
        ("global_blocks", {"starts": (3,), "ends": (3,)}, "an end above its start 3"),
        ("bigbird", {"window": 2}, "an odd number"),
        ("document", {"use": ("windows",)}, "attention.document.use names 'windows'"),
        ("document", {"options": {"fixed": {}}}, "fixed is not in attention.document.use"),
        ("document", {"use": ("fixed",), "options": {"fixed": {"block": 16}}}, "set block for the whole pattern"),
        ("document", {"use": ("fixed",), "options": {"fixed": {"locl": 16}}}, "did you mean 'local'"),
        ("document", {"use": ("fixed",), "options": {"fixed": {"local": 0}}}, "a whole number above 0"),
    ],
)
def test_options_that_do_not_go_together_are_refused(name: str, given: dict[str, Any], words: str) -> None:
    with pytest.raises((DsxError, ManifestError)) as caught:
        options(name, **given).check()
    assert words in str(caught.value)


def test_every_pattern_that_others_may_be_made_of_is_there() -> None:
    for name in NAMES:
        assert options(name).region(Shape(2, 40, 40, 16, True)).touched.any(), name


def _blocks(mask: Tensor, block: int) -> Tensor:
    """Blocks in which some pair is allowed: [heads, n, n]."""
    count = -(-mask.shape[-1] // block)
    padded = torch.nn.functional.pad(mask, (0, count * block - mask.shape[2], 0, count * block - mask.shape[1]))
    return padded.unflatten(2, (count, block)).unflatten(1, (count, block)).any(4).any(2)
