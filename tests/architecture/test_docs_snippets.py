"""Every command and every piece of code in README.md and docs/ works as the page says.

Runs of more than 50 steps are made small and text is cut short (`snippets.quick`); everything else is done as it
stands.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from architecture.snippets import REPOSITORY, Reader, blocks
from built import needs_native
from dsx.contracts import Schedule
from dsx.plugin import Part, hook

SKIPPED = {
    "make quickstart": "makes an environment and downloads torch: .ci/run does",
    "make test": "runs this test",
}

PAGES = sorted(
    place.relative_to(REPOSITORY).as_posix()
    for place in [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    if "```" in place.read_text("utf-8")
)


def given(page: str) -> Mapping[str, Any]:
    """Names that a page speaks of without making them."""
    if page == "docs/explanation/hot-path.md":
        model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
        return {"engine": dsx.prepare(model), "batch": torch.ones(1, 3)}
    if page == "docs/explanation/microkernel.md":
        return {"hook": hook, "Part": Part, "Halving": Schedule}
    return {}


def runs(page: str) -> Any:
    """A page as a parameter: not all can be followed everywhere."""
    on_disk = page in ("docs/how-to/disks.md", "docs/how-to/offload.md")
    return pytest.param(page, marks=needs_native if on_disk else ())


@pytest.mark.parametrize("page", [runs(page) for page in PAGES])
def test_page_works_as_it_says(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    home, site = tmp_path / "home", tmp_path / "site"
    home.mkdir()
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [str(home), str(site), *filter(None, sys.path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.manual_seed(7)
    reader = Reader(page, names=given(page), shown=lambda: "".join(capfd.readouterr()), skipped=SKIPPED, site=site)
    for block in blocks((REPOSITORY / page).read_text("utf-8")):
        reader.read(block)


def read(text: str, capfd: pytest.CaptureFixture[str], site: Path) -> None:
    reader = Reader("page.md", names={}, shown=lambda: "".join(capfd.readouterr()), skipped={}, site=site)
    for block in blocks(text):
        reader.read(block)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Words.\n\n```python\nraise ValueError('no')\n```\n", "no"),
        ("```sh\ndsx explain lost.toml\n```\n", "page.md:2: `dsx explain lost.toml` ends with 2, not 0"),
        ("```sh\ndsx plugins    # exit code 2\n```\n", "`dsx plugins` ends with 0, not 2"),
        ("```sh\nconda list\n```\n", "page.md:2: nobody knows how to run `conda list`"),
        ("```toml\n[optimize]\nuse = ['adamv']\n```\n", "no installed package registers the plugin 'adamv'"),
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "page.md:6: '2' was not printed"),
        ("```rust\n```\n", "page.md:2: a block of the kind 'rust' is not known"),
    ],
)
def test_a_page_that_is_wrong_is_found(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception) as caught:  # noqa: PT011  (an AssertionError, or what the page's own code raises)
        read(text, capfd, tmp_path)
    assert words in str(caught.value)
