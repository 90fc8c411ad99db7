"""Makes a project importable, with its entry points, as `pip install -e` would, in milliseconds."""

from __future__ import annotations

from pathlib import Path

import tomli


def add_metadata(project: Path, site: Path) -> None:
    """Write the metadata of the project in a folder to `site`; both must be on sys.path for it to be installed."""
    described = tomli.loads((project / "pyproject.toml").read_text("utf-8"))["project"]
    name, version = described["name"], described["version"]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    groups = described.get("entry-points", {}).items()
    lines = [
        line for group, points in groups for line in (f"[{group}]", *(f"{key} = {to}" for key, to in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", "utf-8")
