"""What the README says can be done as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text("utf-8")


def test_files_to_read_exist() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(re.findall(r"^\d\. ", TEXT, re.MULTILINE)) == 6
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    commands = set(re.findall(r"(?:^|`)make ([a-z]+)", TEXT, re.MULTILINE))
    assert {"quickstart", "test"} <= commands <= set(targets)


def test_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    torch.manual_seed(7)
    exec(compile(example, "README.md", "exec"), {})
    assert float(capsys.readouterr().out) < 1e-3
