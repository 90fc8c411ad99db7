"""One part of the checks, in a process of its own: `python -m device.part kernels [ARGUMENT] --out FILE`.

A part is a module here with `checks(device, argument)`, which yields names and functions. A function returns figures to
be written down, and raises if something is wrong; the next one runs all the same.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

Figures = Mapping[str, Any] | None
Checks = Iterator[tuple[str, Callable[[], Figures]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part")
    parser.add_argument("argument", nargs="?")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script itself")
    parser.add_argument("--out", type=Path, required=True, help="gets a line of JSON for each check")
    choices = parser.parse_args()
    with choices.out.open("w") as out:
        for name, function in import_module(f"device.{choices.part}").checks(choices.device, choices.argument):
            print(json.dumps(_result(name, function)), file=out, flush=True)


def _result(name: str, function: Callable[[], Figures]) -> dict[str, Any]:
    started, figures, failure = time.perf_counter(), None, None
    try:
        figures = function()
    except Exception as error:
        failure = str(error) if isinstance(error, AssertionError) and str(error) else traceback.format_exc()
    seconds = round(time.perf_counter() - started, 3)
    return {"name": name, "seconds": seconds, "figures": dict(figures or {}), "failure": failure}


if __name__ == "__main__":
    main()
