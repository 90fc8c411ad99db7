"""Plugins that speak for themselves in `dsx explain`, and tables within their options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from attrs import frozen
from click.testing import CliRunner

from dsx.cli import group
from dsx.errors import ManifestError
from dsx.plugin import read_options


def explained(folder: Path, text: str, *flags: str) -> str:
    manifest = folder / "run.toml"
    manifest.write_text(text, "utf-8")
    result = CliRunner().invoke(group, ["explain", str(manifest), *flags])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_section_shows_what_its_plugins_say(tmp_path: Path) -> None:
    text = '[attention]\nuse = ["local_blocks"]\n[attention.local_blocks]\nblock = 128\n[precision]\nuse = ["bf16"]\n'
    shown = explained(tmp_path, text, "--attention")
    assert "local_blocks: the query's block and its neighbours" in shown and "bf16" not in shown
    lines = shown.splitlines()
    (row,) = [line.split() for line in lines if line.split()[:1] == ["4096"]]
    # 32 blocks in a row see themselves and a neighbour on each side: 94 of 1024, causal 63 of 1024 against 528
    assert row == ["4096", "9.18%", "10.9x", "6.15%", "8.4x"]
    assert "  .#+............................." in lines
    assert "\n".join(json.loads(explained(tmp_path, text, "--attention", "--json"))) + "\n" == shown
    both = explained(tmp_path, text, "--precision", "--attention")
    assert both.index("bf16: ") < both.index("local_blocks: ")


def test_a_section_without_plugins_has_nothing_to_say(tmp_path: Path) -> None:
    assert explained(tmp_path, "", "--observe") == ""


@frozen(kw_only=True)
class Inner:
    count: int = 1


def test_a_table_within_options_is_read_as_strictly() -> None:
    assert read_options({"count": 3}, Inner, "attention.mine.inner") == Inner(count=3)
    with pytest.raises(ManifestError) as caught:
        read_options({"count": 1.5, "cuont": 3}, Inner, "attention.mine.inner")
    assert "attention.mine.inner.count: 1.5 will not do" in str(caught.value)
    assert "attention.mine.inner.cuont: unknown key" in str(caught.value)
