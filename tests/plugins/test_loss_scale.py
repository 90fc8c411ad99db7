"""Loss scales: their rule, overflows wherever they come from, and an end that says what overflowed."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attrs import field, frozen
from torch import Tensor, nn

import dsx
from dsx.errors import Halted, ManifestError
from dsx.run.job import run
from dsx.testing import check_plugin
from dsx.testing.models import Tangle, tokens
from dsx.testing.plain import distance, weights_of
from dsx_precision.dynamic_loss_scale import DynamicLossScale, Options

LAYOUTS = ("replicated", "zero1", "zero2", "zero3")
ACCUMULATION = 2


def manifest(layout: str = "replicated", half: str = "fp16", **options: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {
        "run": {"steps": 20},
        "batch": {"accumulation": ACCUMULATION},
        "precision": {"use": [half, "dynamic_loss_scale"], "dynamic_loss_scale": {"initial": 1024.0, **options}},
        "optimize": {"use": ["adamw", "warmup_linear"], "warmup_linear": {"warmup": 5, "total": 20}},
    }
    return tables if layout == "replicated" else tables | {"partition": {"use": [layout]}}


def scales(options: Options, finite: str) -> list[float]:
    """After each update: `.` finite, `x` not."""
    scale = DynamicLossScale(options)
    found = []
    for sign in finite:
        scale.update(sign == ".")
        found.append(scale.value)
    return found


@pytest.mark.parametrize(
    ("options", "finite", "expected"),
    [
        ({}, ".....", [8, 8, 16, 16, 16]),
        ({}, "..x...x", [8, 8, 4, 4, 4, 8, 4]),
        ({"factor": 4.0}, "...x", [8, 8, 32, 8]),
        ({"minimum": 4.0, "at_minimum": "continue"}, "xxx", [4, 4, 4]),
        ({"minimum": 3.0, "at_minimum": "continue"}, "xxx", [4, 3, 3]),
        # of two overflows the first only skips; the count is set back by growth
        ({"hysteresis": 2}, "xx", [8, 4]),
        ({"hysteresis": 2}, "x..x", [8, 8, 8, 4]),
        ({"hysteresis": 2}, "xxx", [8, 4, 2]),
        ({"hysteresis": 2}, "x...x", [8, 8, 8, 16, 16]),
        # in a row only
        ({"hysteresis": 2, "consecutive_hysteresis": True}, "x.x.x", [8, 8, 8, 8, 8]),
        ({"hysteresis": 2, "consecutive_hysteresis": True}, "xxx", [8, 4, 2]),
        ({"hysteresis": 3, "consecutive_hysteresis": True}, "xx.xxx", [8, 8, 8, 8, 8, 4]),
    ],
)
def test_the_rule(options: dict[str, Any], finite: str, expected: list[float]) -> None:
    assert scales(Options(**{"initial": 8.0, "window": 3, **options}), finite) == expected


def test_it_is_torchs_grad_scaler() -> None:
    ours = DynamicLossScale(Options(initial=1024.0, window=4, factor=2.0, minimum=1e-30))
    theirs = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    parameter = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter])
    chance = random.Random(0)
    for _ in range(100):
        finite = chance.random() < 0.8
        theirs.scale(parameter * (1.0 if finite else math.inf)).backward()
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(finite)
        assert ours.value == theirs.get_scale()


def test_it_never_becomes_infinite() -> None:
    assert all(map(math.isfinite, scales(Options(initial=2.0**1022, window=1), "....x")))


def test_the_scaled_loss_is_fp32_or_more() -> None:
    scale = DynamicLossScale(Options(initial=65536.0))
    assert scale.scale(torch.tensor(3.0).half()) == 3 * 65536.0
    assert scale.scale(torch.tensor(3.0).bfloat16()).dtype == torch.float32
    assert scale.scale(torch.tensor(3.0).double()).dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"initial": math.inf}, "dynamic_loss_scale.initial: inf is refused"),
        ({"initial": math.nan}, "dynamic_loss_scale.initial: nan is refused"),
        ({"initial": True}, "dynamic_loss_scale.initial: true will not do; expected a number above 0"),
        ({"initial": 0.5}, "initial = 0.5 is below minimum = 1"),
        ({"window": 0}, "dynamic_loss_scale.window: 0 will not do; expected a whole number above 0"),
        ({"minimum": 0.0}, r"dynamic_loss_scale.minimum: 0.0 will not do; expected a number above 0"),
        ({"hysteresis": 0}, "dynamic_loss_scale.hysteresis: 0 will not do"),
        ({"factor": 1.0}, r"dynamic_loss_scale.factor: 1.0 will not do; expected a number above 1"),
        ({"at_minimum": "stop"}, 'dynamic_loss_scale.at_minimum: "stop" will not do; expected "raise" or "continue"'),
    ],
)
def test_what_makes_no_scale_is_refused(options: dict[str, Any], words: str) -> None:
    """Cases 4 and 5."""
    with pytest.raises(ManifestError, match=words):
        dsx.prepare(Tangle(), manifest(**options))


@pytest.mark.parametrize("value", [math.inf, math.nan, True, 0, -1.0])
def test_what_makes_no_static_scale_is_refused(value: Any) -> None:
    """Case 4."""
    table = {"use": ["static_loss_scale"], "static_loss_scale": {"scale": value}}
    with pytest.raises(ManifestError, match=rf"static_loss_scale.scale: {str(value).lower()} (is refused|will not do)"):
        dsx.prepare(Tangle(), {"precision": table})


def test_bf16_has_no_scale_unless_asked() -> None:
    """Case 51."""
    engine = dsx.prepare(Tangle(), {"precision": {"use": ["bf16"]}})
    engine.backward(engine(*tokens(0, 0, 0)))
    report = engine.step()
    assert (report.scale, report.multiplier) == (1.0, 1.0)


def losses(scale: dict[str, Any]) -> list[float | None]:
    engine = dsx.prepare(Tangle(), {"precision": scale, "optimize": {"clip_norm": 1.0}})
    found = []
    for step in range(4):
        engine.backward(engine(*tokens(step, 0, 0)))
        found.append(engine.step().loss)
    return found


@pytest.mark.parametrize("half", ["bf16", "fp32", "autocast"])
@pytest.mark.parametrize("scaler", ["dynamic_loss_scale", "static_loss_scale"])
def test_where_no_scale_is_needed_it_changes_nothing(half: str, scaler: str) -> None:
    static = {"static_loss_scale": {"scale": 4096.0}} if scaler == "static_loss_scale" else {}
    assert losses({"use": [half, scaler], **static}) == losses({"use": [half]})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dynamic_loss_scale", {}),
        ("dynamic_loss_scale", {"window": 1, "hysteresis": 2, "initial": 4.0}),
        ("static_loss_scale", {"scale": 128.0}),
    ],
)
def test_they_keep_their_contract(ranks: Any, name: str, options: dict[str, Any]) -> None:
    check_plugin(name, options, ranks=ranks)


@frozen
class Seen:
    """One update of one rank.

    after  the scale for the next
    moved  how far the weights went
    """

    skipped: bool
    steps: int
    skips: int
    scale: float
    after: float
    lr: float | None
    moved: float = field(eq=False)


Overflow = tuple[int, int, int]
"""Update, micro-batch and rank of a loss that is Inf."""


def train(layout: str, overflows: list[Overflow], options: dict[str, Any]) -> list[Seen]:
    engine = dsx.prepare(Tangle(), manifest(layout, **options))
    seen, before, rank = [], weights_of(engine), dist.get_rank()
    for step in range(5):
        for micro in range(ACCUMULATION):
            loss = engine(*tokens(step, micro, rank))
            engine.backward(loss * math.inf if (step, micro, rank) in overflows else loss)
            report = engine.step()
        after = weights_of(engine)
        scale, lr = engine.program.scaler.value, report.lr.get("all")
        moved = distance(after, before)
        seen.append(Seen(report.skipped, report.step, report.skips, report.scale, scale, lr, moved))
        before = after
    engine.close()
    return seen


def train_everywhere(overflows: list[Overflow], options: dict[str, Any]) -> dict[str, list[Seen]]:
    return {layout: train(layout, overflows, options) for layout in LAYOUTS}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize(
    ("where", "options", "skipped"),
    [
        ((0, 0, 0), {}, 0),  # the very first
        ((2, ACCUMULATION - 1, -1), {}, 2),  # the last micro-batch, on the last rank only
        ((3, 0, 0), {"initial": 1.0, "at_minimum": "continue"}, 3),  # nowhere to shrink to
    ],
)
def test_an_overflow_is_skipped_by_all_ranks(
    ranks: Any, world: int, where: Overflow, options: dict[str, Any], skipped: int
) -> None:
    """Cases 58, 59, 61, 63 and 64: no state, counter or rate moves, and the scale shrinks."""
    overflow = (where[0], where[1], where[2] % world)
    everywhere = ranks.run(train_everywhere, [overflow], options, world=world, timeout=120)
    first = everywhere[0]["replicated"]
    for found in everywhere:
        for layout in LAYOUTS:
            assert found[layout] == first, layout
            for step, seen in enumerate(found[layout]):
                assert (seen.moved == 0) == (step == skipped), (layout, step)
    scale = options.get("initial", 1024.0)
    assert [seen.skipped for seen in first] == [step == skipped for step in range(5)]
    assert [seen.steps for seen in first] == [step + (step < skipped) for step in range(5)]
    assert [seen.skips for seen in first] == [int(step >= skipped) for step in range(5)]
    assert [seen.scale for seen in first] == [scale if step <= skipped else max(scale / 2, 1) for step in range(5)]
    rates = [seen.lr for seen in first if not seen.skipped]
    assert rates == pytest.approx([1e-3 * step / 5 for step in range(1, 5)])


def poison(model: nn.Module, name: str) -> None:
    """From now on the gradient of a parameter has an Inf in its last element."""

    def last(gradient: Tensor) -> Tensor:
        changed = gradient.clone()
        changed.view(-1)[-1] = math.inf
        return changed

    dict(model.named_parameters())[name].register_hook(last)


def halt(layout: str, name: str, table: dict[str, Any], folder: str) -> tuple[str, bool, bool]:
    """What the last rank's overflow at the minimum says on each; what is saved then goes on."""
    model = Tangle()
    engine = dsx.prepare(model, manifest(layout) | {"precision": table})
    batches = [tokens(0, micro, dist.get_rank()) for micro in range(ACCUMULATION)]
    engine.train_step(batches)
    before = weights_of(engine)
    if dist.get_rank() == dist.get_world_size() - 1:
        poison(model, name)
    with pytest.raises(Halted) as caught:
        engine.train_step(batches)
    engine.save(f"{folder}/{layout}")
    unmoved = distance(weights_of(engine), before) == 0 and (engine.steps, engine.skips) == (1, 1)
    engine.close()
    again = dsx.prepare(Tangle(), manifest(layout) | {"precision": table})
    again.load(f"{folder}/{layout}")
    report = again.train_step(batches)
    again.close()
    return str(caught.value), unmoved, (report.step, report.skips, report.stepped) == (2, 1, True)


def halt_everywhere(name: str, table: dict[str, Any], folder: str) -> list[tuple[str, bool, bool]]:
    return [halt(layout, name, table, folder) for layout in LAYOUTS]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_an_overflow_at_the_minimum_names_the_parameter_on_all_ranks(ranks: Any, world: int, tmp_path: Path) -> None:
    """Case 61."""
    table = {"use": ["fp16", "dynamic_loss_scale"], "dynamic_loss_scale": {"initial": 2.0, "minimum": 2.0}}
    for found in ranks.run(halt_everywhere, "blocks.1.up.weight", table, str(tmp_path), world=world, timeout=120):
        for words, unmoved, resumed in found:
            assert "gradients overflow at the smallest loss scale, 2" in words
            assert "the parameter 'blocks.1.up.weight'\n" in words
            assert "the unit '" in words
            assert unmoved and resumed


def test_a_static_scale_can_end_training_in_any_precision(ranks: Any, tmp_path: Path) -> None:
    """Case 58."""
    table = {"use": ["static_loss_scale"], "static_loss_scale": {"scale": 1.0, "at_overflow": "raise"}}
    for found in ranks.run(halt_everywhere, "rows", table, str(tmp_path), world=2):
        for words, unmoved, resumed in found:
            assert "gradients are not finite at the loss scale 1" in words
            assert "the unit 'root', the parameter 'rows'\n" in words
            assert unmoved and resumed


def test_units_are_named_where_parameters_are_in_them(ranks: Any, tmp_path: Path) -> None:
    table = {"use": ["static_loss_scale"], "static_loss_scale": {"scale": 1.0, "at_overflow": "raise"}}
    ((words, _, _),) = ranks.run(_zero3_only, "blocks.2.down.bias", table, str(tmp_path), world=1)[0:1]
    assert "the unit 'blocks.2', the parameter 'blocks.2.down.bias'\n" in words


def _zero3_only(name: str, table: dict[str, Any], folder: str) -> tuple[str, bool, bool]:
    return halt("zero3", name, table, folder)


def test_a_norm_beyond_the_range_is_said() -> None:
    table = {"use": ["static_loss_scale"], "static_loss_scale": {"scale": 1e30, "at_overflow": "raise"}}
    engine = dsx.prepare(Tangle(), {"precision": table})
    engine.backward(engine(*tokens(0, 0, 0)))
    with pytest.raises(Halted, match="every gradient is finite, and their squared norm is not"):
        engine.step()


def resumed(folder: str, layout: str, cut: int) -> tuple[list[float], dict[str, Tensor]]:
    """Scales by update, with a new engine after `cut` of them; updates 1 and 4 overflow."""
    engine, found = dsx.prepare(Tangle(), manifest(layout, window=3, hysteresis=2)), []
    for step in range(10):
        if step == cut:
            engine.save(f"{folder}/{layout}")
            engine.close()
            engine = dsx.prepare(Tangle(), manifest(layout, window=3, hysteresis=2))
            engine.load(f"{folder}/{layout}")
        for micro in range(ACCUMULATION):
            loss = engine(*tokens(step, micro, dist.get_rank()))
            engine.backward(loss * math.inf if step in (1, 2, 6, 7) else loss)
            engine.step()
        found.append(engine.program.scaler.value)
    weights = weights_of(engine)
    engine.close()
    return found, weights


@pytest.mark.parametrize("layout", ["replicated", "zero3"])
def test_its_state_resumes_exactly(ranks: Any, tmp_path: Path, layout: str) -> None:
    """At each place of the rule: within a window, between two overflows, after one."""
    straight = ranks.run(resumed, str(tmp_path), layout, -1, world=2)
    assert len(set(straight[0][0])) > 1
    for cut in (2, 5, 7):
        for (found, weights), (expected, wanted) in zip(
            ranks.run(resumed, str(tmp_path / str(cut)), layout, cut, world=2), straight, strict=True
        ):
            assert found == expected
            assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())


def test_a_checkpoint_of_a_larger_scale_is_kept_within_the_options() -> None:
    scale = DynamicLossScale(Options(initial=64.0, minimum=16.0, window=2, hysteresis=1))
    scale.load({"value": 4.0, "good": 5, "left": 3})
    assert (scale.value, scale.good, scale.left) == (16.0, 1, 1)


RUN = """
[run]
steps = 6
out = "{out}"
[batch]
global = 4
[model]
factory = "run_targets:bursting"
[data]
source = "run_targets:logged"
length = 50
[precision]
use = ["static_loss_scale"]
[precision.static_loss_scale]
scale = 8.0
at_overflow = "raise"
"""


def test_dsx_run_saves_before_it_ends(ranks: Any, tmp_path: Path) -> None:
    """Case 61: and a resumed run goes on behind the samples that overflowed."""
    path = tmp_path / "run.toml"
    path.write_text(RUN.format(out=tmp_path / "out"))
    for error in ranks.errors(run, str(path), world=2):
        assert isinstance(error, Halted)
        assert "the parameter 'inside.weight'" in str(error)
        assert "the state is saved: --resume goes on from it" in str(error)
    summaries = ranks.run(run, str(path), (), False, "latest", world=2)
    assert [(summary.updates, summary.skips) for summary in summaries] == [(6, 1)] * 2
