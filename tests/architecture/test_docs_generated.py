"""The reference says what the code says: the committed pages are those that docs/generate.py makes."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_reference_is_what_the_code_says() -> None:
    pages: dict[str, str] = runpy.run_path(str(DOCS / "generate.py"))["pages"]()
    stale = [name for name, text in pages.items() if (DOCS / "reference" / name).read_text("utf-8") != text]
    assert stale == [], "docs/reference is not up to date: run `make docs` or `python docs/generate.py`"
