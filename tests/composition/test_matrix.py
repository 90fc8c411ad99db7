"""Every pair of registered plugins, and the triples of precision, optimizer and schedule: parity with plain PyTorch on
two ranks, or a refusal that says why. The table in docs/reference/composition.md is made of what this test saw.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import dsx
from built import HAS_NATIVE, needs_native
from composition.recipes import RECIPES, STEPS, complete, plain
from dsx.entries import PLUGINS, Entries
from dsx.errors import CapabilityMissing, DsxError, SlotConflict
from dsx.testing import distance, largest
from dsx.testing.models import Attentive, Tangle, tokens

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "composition.md"
WORLD, ACCUMULATION, CLIP = 2, 2, 0.5
OURS = sorted({e.name for e in Entries.scan(PLUGINS).registrations if e.distribution.startswith("dsx-engine ")})
APART = [name for name in OURS if name not in RECIPES or RECIPES[name].alike is None]
"""Those that are paired with each other."""
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}
"""By the dtype of the masters; those of bf16 parameters are fp32."""


def manifest(names: Sequence[str]) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "run": {"steps": STEPS},
        "batch": {"accumulation": ACCUMULATION},
        "optimize": {"clip_norm": CLIP},
    }
    for name in complete(names):
        recipe = RECIPES[name]
        table = tables.setdefault(recipe.section, {})
        table.setdefault("use", []).append(name)
        if recipe.options:
            table[name] = dict(recipe.options)
    return tables


def model(names: Sequence[str]) -> nn.Module:
    """With attention, where a plugin claims it."""
    attends = any(RECIPES[name].section == "attention" for name in names)
    return (Attentive() if attends else Tangle()).double()


def train(names: Sequence[str]) -> tuple[list[float], dict[str, Tensor]] | str:
    """On one rank: losses and weights, or the refusal."""
    try:
        engine = dsx.prepare(model(names), manifest(names))
    except (SlotConflict, CapabilityMissing) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    losses = []
    for step in range(STEPS):
        try:
            report = engine.train_step(tokens(step, micro, dist.get_rank()) for micro in range(ACCUMULATION))
        except DsxError as refusal:
            engine.close()
            return f"{type(refusal).__name__}: {refusal.what}"
        losses.append(report.loss)
    weights = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.close()  # an engine has a dozen threads, and there are hundreds of them
    return losses, weights


def combinations() -> Iterator[tuple[str, ...]]:
    yield from itertools.combinations(OURS, 1)
    yield from itertools.combinations(APART, 2)
    kinds = ("layout", "half", "optimizer", "rates", "attend")
    by = {kind: [n for n in APART if n in RECIPES and getattr(RECIPES[n], kind)] for kind in kinds}
    yield from itertools.product(by["layout"], by["half"], by["optimizer"])
    yield from itertools.product(by["layout"], ["cpu_offload", "nvme_offload"], ["bf16", "delayed_update"])
    yield from itertools.product(by["layout"], ["early_update"], ["bf16", "sgd"])
    yield from itertools.product(by["half"], by["optimizer"], by["rates"])
    yield from itertools.product(by["layout"], by["half"], by["attend"])
    yield "dense", *by["attend"]


def possible(names: Sequence[str]) -> bool:
    """Whether this installation has what they need."""
    return HAS_NATIVE or "nvme_offload" not in complete(names)


def together(every: Sequence[Sequence[str]]) -> list[Any]:
    """All combinations in one call: a process group for each would take longer than the training."""
    return [train(names) for names in every]


def test_every_registered_plugin_has_a_recipe() -> None:
    assert set(OURS) == set(RECIPES), "tests/composition/recipes.py says what each plugin is equal to in plain PyTorch"


@pytest.fixture(scope="module")
def outcomes(ranks) -> dict[tuple[str, ...], Any]:
    every = [names for names in combinations() if possible(names)]
    first, second = ranks.run(together, every, world=WORLD, timeout=600)
    for names, one, other in zip(every, first, second, strict=True):
        assert type(one) is type(other), names
        if not isinstance(one, str):
            assert all(torch.equal(tensor, other[1][name]) for name, tensor in one[1].items()), names
    return dict(zip(every, first, strict=True))


@pytest.mark.parametrize("names", list(combinations()), ids="+".join)
def test_a_combination_trains_like_plain_pytorch_or_is_refused(names: tuple[str, ...], outcomes) -> None:
    if not possible(names):
        pytest.skip("no native library here, which states in files need")
    outcome = outcomes[names]
    if (words := RECIPES[names[0]].refused) is not None:
        assert isinstance(outcome, str) and words in outcome
        return
    if isinstance(outcome, str):
        assert clash(names), outcome
        for name in clash(names):
            assert f"'{name}'" in outcome
        return
    assert not clash(names), f"{names} fill one role and are not refused"
    losses, weights = outcome
    expected_losses, expected = measure(tuple(name for name in complete(names) if changes(name)))
    tolerance = TOLERANCE[next(iter(expected.values())).dtype]
    assert largest(losses, expected_losses) < tolerance
    assert distance(weights, expected) < tolerance
    moved = distance(weights, {name: p.detach() for name, p in model(names).named_parameters()})
    assert moved > 10 * tolerance or moved > 1e-3


def changes(name: str) -> bool:
    """Whether plain PyTorch knows what this plugin does: observers and layouts change no number."""
    recipe = RECIPES[name]
    kinds = ("optimizer", "rates", "half", "scales", "delayed", "attend")
    return any(getattr(recipe, kind) for kind in kinds)


@cache
def measure(names: tuple[str, ...]) -> tuple[list[float], dict[str, Tensor]]:
    """Plain PyTorch's losses and weights."""
    return plain(model(names), names, tokens, world=WORLD, accumulation=ACCUMULATION, clip_norm=CLIP)


def clash(names: Sequence[str]) -> list[str]:
    """Those that fill one role, if there are two of a kind."""
    for kind in ("optimizer", "rates", "precision", "scales", "layout", "attend"):
        several = [name for name in names if getattr(RECIPES[name], kind)]
        if len(several) > 1:
            return several
    for name in names:
        if without := [other for other in names if other in RECIPES[name].lacks]:
            return [name, *without]
    return []


def table(outcomes: dict[tuple[str, ...], Any]) -> str:
    lines = [
        "# Which plugins go together",
        "",
        "<!-- written by tests/composition/test_matrix.py: DSX_WRITE_DOCS=1 make test -->",
        "",
        f"Made by a test that trains every pair for {STEPS} updates on {WORLD} ranks, with accumulation, clipping, a",
        "model of odd shapes. `=` is parity with plain PyTorch, every weight within 1e-9 in float64, 1e-6 in 16 bits;",
        "`one` is a refusal before the first step, because both fill a role that takes one, `no` one because one needs",
        "what the other does not offer. `fp16` has a `static_loss_scale` beside it where no other scale is there, and",
        "`early_update` has `nvme_offload`, and `adamw` where no other optimizer is there.",
        "`onebit_adam`, `onebit_lamb` and `zero_one_adam` are in their warm-up here; after it they are equal to the",
        "algorithms of their papers (tests/plugins/test_onebit.py, test_onebit_lamb.py, test_zero_one.py).",
        "`sliding_window` stands for all patterns of attention, which are trained alone as well; `document` is",
        "refused: this model brings no segment ids.",
        "",
        "| | " + " | ".join(APART) + " |",
        "|---" * (len(APART) + 1) + "|",
    ]
    for row in APART:
        cells = []
        for column in APART:
            names = (row,) if row == column else tuple(sorted((row, column)))
            cells.append(cell(outcomes[names]))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    triples = sum(len(names) == 3 for names in outcomes)
    lines += [
        "",
        f"The {triples} triples of layout, precision and optimizer, of layout, tier and precision or delayed update,",
        "of layout, early update and precision or optimizer,",
        "of precision, optimizer and schedule, and of layout, precision and attention are trained too, with parity or",
        "a refusal as in the table.",
    ]
    return "\n".join(lines) + "\n"


def cell(outcome: Any) -> str:
    if isinstance(outcome, str):
        return "one" if outcome.startswith("SlotConflict") else "no"
    return "="


@needs_native
def test_the_table_in_the_docs_is_what_was_seen(outcomes) -> None:
    if os.environ.get("DSX_WRITE_DOCS"):
        DOCS.write_text(table(outcomes), "utf-8")
    assert DOCS.read_text("utf-8") == table(outcomes), "write it anew with DSX_WRITE_DOCS=1"
