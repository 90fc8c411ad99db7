"""The line of each key, found without a second parser."""

from __future__ import annotations

import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.manifest.lines import key_lines
from dsx.manifest.words import dotted

NAMES = ("k{}", "k-{}", '"k {}"', '"k.{}"', "'k={}'", '"[k{}]"', "k{} ")
VALUES = (
    "1",
    '"a = 1"',
    "'''\nk = 1\n[k]\n'''",
    '"""one \\\n  [[two]] # no comment\n\\""" three"""',
    "[\n  1, # ]\n\n  2,\n]",
    '[[1], ["]",\n"x"]]',
    "{ inner = [1, 2], other = 'x' }",
    "[{ inner = 1 },\n { inner = 2 }]",
    "{\n  inner = 1,\n}",
    "1979-05-27 07:32:00  # a comment = 1",
)
FILLERS = ("", "   ", "# k = 1", "\t# [x]")
HEADERS = ("[h{}]", " [ h{} . sub ]  # x", '["h {}".sub]', "[[h{}]]")


@st.composite
def documents(draw: st.DrawFn) -> tuple[str, dict[str, int]]:
    """A TOML text and the lines of its keys, as it was put together."""
    lines: list[str] = []
    expected: dict[str, int] = {}
    path: tuple[str, ...] = ()
    for number in range(draw(st.integers(0, 12))):
        kind = draw(st.sampled_from(("filler", "header", "statement", "statement")))
        if kind == "filler":
            lines.append(draw(st.sampled_from(FILLERS)))
            continue
        if kind == "header":
            header = draw(st.sampled_from(HEADERS)).format(number)
            path = _innermost(tomli.loads(header))
            expected[_rendered(path)] = len(lines) + 1
            lines.append(header)
            continue
        name = draw(st.sampled_from(NAMES)).format(number)
        statement = f"{name} = {draw(st.sampled_from(VALUES))}"
        (key,) = tomli.loads(statement)
        expected[_rendered((*path, key))] = len(lines) + 1
        lines.extend(statement.split("\n"))
    return draw(st.sampled_from(("\n", "\r\n"))).join(lines), expected


def _innermost(table: object) -> tuple[str, ...]:
    path: tuple[str, ...] = ()
    while table:
        if isinstance(table, list):
            path, table = (*path, 0), table[0]
        else:
            ((name, table),) = table.items()
            path = (*path, name)
    return path


def _rendered(path: tuple[str | int, ...]) -> str:
    key = ""
    for step in path:
        key = f"{key}[{step}]" if isinstance(step, int) else dotted(key, step)
    return key


@given(documents())
@settings(max_examples=150, deadline=None)
def test_every_key_is_found_on_the_line_it_was_written_on(document: tuple[str, dict[str, int]]) -> None:
    text, expected = document
    tomli.loads(text)
    found = key_lines(text)
    assert {key: found.get(key) for key in expected} == expected


def test_arrays_of_tables_are_counted_within_the_table_that_holds_them() -> None:
    text = "[[a]]\nx = 1\n[[a.b]]\ny = 1\n[[a]]\n[[a.b]]\ny = 2\n[a.b.c]\nz = 1\n"
    found = key_lines(text)
    assert found["a[0].x"] == 2
    assert found["a[0].b[0].y"] == 4
    assert found["a[1].b[0].y"] == 7
    assert found["a[1].b[0].c.z"] == 9


def test_dotted_keys_and_inline_tables_give_each_step_its_line() -> None:
    found = key_lines('[optimize]\nadamw.lr = 1\nother = { "a b" = [{ c = 1 }] }\n')
    assert found["optimize.adamw"] == found["optimize.adamw.lr"] == 2
    assert found['optimize.other."a b"[0].c'] == 3


def test_a_line_separator_of_unicode_is_no_line_end() -> None:
    assert key_lines('a = "x\u2028y\x85z"\nb = 1\n')["b"] == 2


def test_a_long_array_is_not_read_once_for_each_of_its_lines() -> None:
    text = "x = [\n" + "  1,\n" * 50_000 + "]\ny = 1\n"
    assert key_lines(text) == {"x": 1, "y": 50_003}
