"""Prints the wheels of a folder whose projects this Python lacks, or has too old: `python lacking.py FOLDER`."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

AT_LEAST = {"setuptools": 77}
"""Major versions: with an older one the project's own metadata are not understood."""


def main() -> None:
    wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
    if not wheels:
        sys.exit(f"there are no wheels in {sys.argv[1]}: bash tests/device/wheels.sh {sys.argv[1]}")
    for wheel in wheels:
        name = wheel.name.partition("-")[0].replace("_", "-")
        if _lacks(name):
            print(wheel.resolve())


def _lacks(name: str) -> bool:
    try:
        major = re.match(r"\d+", version(name))
    except PackageNotFoundError:
        return True
    return major is not None and int(major[0]) < AT_LEAST.get(name, 0)


if __name__ == "__main__":
    main()
