"""A plugin's own options class, read from its table."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from attrs import field, frozen

from dsx.errors import ManifestError, Problem
from dsx.manifest import Manifest, choice, fraction, non_negative, positive, structure, unit_interval


@frozen(kw_only=True)
class Inner:
    size: Annotated[int, positive]
    label: str = "x"


@frozen(kw_only=True)
class Options:
    lr: Annotated[float, positive] = 1e-3
    betas: tuple[Annotated[float, fraction], Annotated[float, fraction]] = (0.9, 0.999)
    mode: Literal["fast", "slow"] = "fast"
    level: Literal[1, 2] = 1
    device: Annotated[str, choice("cpu", "cuda")] = "cpu"
    ratio: Annotated[float, unit_interval] | None = None
    window: Annotated[int | None, non_negative] = None
    scale: Annotated[float, positive] | Literal["dynamic"] = "dynamic"
    path: Path | None = None
    free: dict[str, object] = field(factory=dict)
    sizes: Mapping[str, Annotated[int, positive]] = field(factory=dict)
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    names: list[str] = field(factory=list)
    unordered: frozenset[str] = frozenset()
    quick: bool = False
    lambda_: float = 1.0
    anything: Any = 0

    def __attrs_post_init__(self) -> None:
        if self.lambda_ > 5:
            raise ValueError("lambda is above 5, where it does not converge")


@frozen(kw_only=True)
class Needed:
    path: Path


def read(**table: object) -> tuple[Options | None, dict[str, Problem]]:
    options, problems = structure(table, Options, "s.p")
    return options, {problem.key.removeprefix("s.p."): problem for problem in problems}


def test_every_kind_of_field_is_read() -> None:
    options, problems = read(
        lr=1,
        betas=[0, 0.5],
        mode="slow",
        level=2,
        ratio=1,
        window=0,
        scale=2,
        path="/nvme",
        free={"a": [1, {"b": 2}]},
        sizes={"x": 1},
        inner={"size": 3},
        many=[{"size": 1}, {"size": 2, "label": "y"}],
        names=["a", "b"],
        unordered=["a", "b"],
        quick=True,
        anything=[1, "a"],
        **{"lambda": 2},
    )
    assert not problems and options is not None
    assert options.lr == 1.0 and isinstance(options.lr, float)
    assert options.betas == (0.0, 0.5) and options.window == 0 and options.ratio == 1.0 and options.scale == 2.0
    assert (options.mode, options.level, options.path, options.lambda_) == ("slow", 2, Path("/nvme"), 2.0)
    assert options.free == {"a": [1, {"b": 2}]} and isinstance(options.free, dict)
    assert options.sizes == {"x": 1} and not hasattr(options.sizes, "update")
    assert options.inner == Inner(size=3) and options.many == (Inner(size=1), Inner(size=2, label="y"))
    assert options.unordered == {"a", "b"}
    assert (options.names, options.quick, options.anything) == (["a", "b"], True, (1, "a"))


@pytest.mark.parametrize(
    ("key", "value", "place", "expected"),
    [
        ("lr", 0, "lr", "a number above 0"),
        ("lr", True, "lr", "a number above 0"),
        ("lr", "1e-4", "lr", "a number above 0"),
        ("lr", [], "lr", "a number above 0"),
        ("betas", [0.9, 1], "betas[1]", "a number from 0 to below 1"),
        ("betas", [0.9], "betas", "a list of 2, each a number from 0 to below 1"),
        ("betas", "auto", "betas", "a list of 2, each a number from 0 to below 1"),
        ("betas", [float("nan"), 0.9], "betas[0]", "a finite number"),
        ("level", True, "level", "1 or 2"),
        ("level", 1.0, "level", "1 or 2"),
        ("ratio", 1.1, "ratio", "a number from 0 to 1"),
        ("window", -1, "window", "a whole number of 0 or more"),
        ("window", 4.0, "window", "a whole number of 0 or more"),
        ("scale", "off", "scale", 'a number above 0 or "dynamic"'),
        ("scale", 0, "scale", 'a number above 0 or "dynamic"'),
        ("path", "", "path", "a path"),
        ("free", 3, "free", "a table"),
        ("sizes", {"a": 1, "b.c": 0}, 'sizes."b.c"', "a whole number above 0"),
        ("inner", {}, "inner.size", "a whole number above 0"),
        ("inner", [1], "inner", "a table"),
        ("many", [{"size": 1}, {"size": 0}], "many[1].size", "a whole number above 0"),
        ("many", {"size": 1}, "many", "a list, each item a table"),
        ("names", ["a", 1], "names[1]", "a text"),
        ("unordered", "ab", "unordered", "a list, each item a text"),
        ("names", "ab", "names", "a list, each item a text"),
        ("quick", 1, "quick", "true or false"),
        ("quick", "yes", "quick", "true or false"),
        ("lambda", "x", "lambda", "a number"),
        ("anything", None, "anything", "a value; leave the key out for the default"),
        ("anything", 2**63, "anything", "a whole number of at most 64 bits"),
        ("anything", {1}, "anything", "what TOML can hold"),
        ("anything", {"": 1}, 'anything.""', None),
    ],
)
def test_a_wrong_value_is_refused_at_its_place(key: str, value: object, place: str, expected: str | None) -> None:
    options, problems = read(**{key: value})
    assert options is None
    assert list(problems) == [place]
    assert problems[place].expected == expected


@pytest.mark.parametrize(
    ("key", "value", "near"), [("mode", "fats", "fast"), ("device", "cudaa", "cuda"), ("device", "abacus", None)]
)
def test_a_misspelt_choice_is_offered_the_nearest(key: str, value: str, near: str | None) -> None:
    _, problems = read(**{key: value})
    assert problems[key].nearest == near
    assert '"fast" or "slow"' in str(problems[key]) or 'out of "cpu", "cuda"' in str(problems[key])


def test_an_unknown_option_is_refused_with_the_nearest_or_with_all() -> None:
    _, problems = read(beta=(0.9, 0.9), inner={"size": 1, "colour": 1}, lambda_=1.0)
    assert problems["beta"].nearest == "betas"
    assert problems["inner.colour"].expected == "one of size, label"
    assert problems["lambda_"].nearest == "lambda"


def test_a_problem_of_the_whole_table_is_the_class_s_own_words() -> None:
    options, problems = structure({"lambda": 9}, Options, "s.p")
    assert options is None
    assert [str(problem) for problem in problems] == ["s.p: lambda is above 5, where it does not converge"]


def test_a_fault_of_the_class_itself_is_no_problem_of_the_manifest() -> None:
    @frozen
    class Faulty:
        def __attrs_post_init__(self) -> None:
            raise ZeroDivisionError("a mistake of the plugin's author")

    with pytest.raises(ZeroDivisionError, match="plugin's author"):
        structure({}, Faulty, "s.p")


def test_options_default_and_are_placed_where_they_were_given(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[optimize]\nuse = ["adamw", "sgd"]\n[optimize.adamw]\nlr = 3e-4\n')
    manifest = Manifest.load(path)
    assert manifest.options("optimize", "adamw", Options) == Options(lr=3e-4)
    assert manifest.options("optimize", "sgd", Options) == Options()
    with pytest.raises(ManifestError, match=r"run\.toml:4: optimize\.adamw\.lr: 0\.0003 will not do; expected a path"):
        manifest.options("optimize", "adamw", frozen(type("P", (), {"__annotations__": {"lr": Path}})))


def test_the_options_of_many_plugins_are_checked_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[partition]\nuse = ["offload", "plain"]\n[partition.plain]\nx = 1\n[optimize]\nuse = ["adamw"]\n'
        "[optimize.adamw]\nlr = -1.0\nmist = 3\n"
    )
    manifest = Manifest.load(path, ["optimize.adamw.quick=2"])
    with pytest.raises(ManifestError) as caught:
        manifest.check_options(
            {("partition", "offload"): Needed, ("partition", "plain"): None, ("optimize", "adamw"): Options}
        )
    found = {problem.key: (problem.file, problem.line) for problem in caught.value.problems}
    assert found == {
        "partition.offload.path": (path, 1),
        "partition.plain.x": (path, 4),
        "optimize.adamw.lr": (path, 8),
        "optimize.adamw.mist": (path, 9),
        "optimize.adamw.quick": ("--set", None),
    }
    assert "partition.plain.x: unknown key; expected no key here" in str(caught.value)


def test_case_19_a_required_option_that_is_missing_is_refused() -> None:
    manifest = Manifest.of({"partition": {"use": ["offload"]}})
    with pytest.raises(ManifestError, match=r"partition\.offload\.path: is missing; expected a path"):
        manifest.options("partition", "offload", Needed)


def test_good_options_of_many_plugins_come_back_by_section_and_name() -> None:
    manifest = Manifest.of({"optimize": {"use": ["adamw", "plain"], "adamw": {"lr": 1}}})
    options = manifest.check_options({("optimize", "adamw"): Options, ("optimize", "plain"): None})
    assert options == {("optimize", "adamw"): Options(lr=1.0), ("optimize", "plain"): None}
