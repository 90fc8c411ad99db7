"""Every manifest of docs/manifests is explained and trains, made small."""

from __future__ import annotations

from pathlib import Path

import pytest

from architecture.snippets import REPOSITORY, quick
from dsx.cli import call

MANIFESTS = sorted((REPOSITORY / "docs" / "manifests").glob("*.toml"))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_is_explained_and_trains(
    manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert call(["explain", str(manifest)]) == 0
    assert f"{manifest.name}:" in capsys.readouterr().out
    assert call(["run", str(manifest), "--nproc", "1", *quick(manifest)]) == 0
    shown = capsys.readouterr()
    assert "step 2/2  loss " in shown.err
    assert (tmp_path / "runs" / manifest.stem / "model.safetensors").is_file(), "run.name is the file's name"


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_manifest_says_how_to_run_it(manifest: Path) -> None:
    assert f"\n#   dsx run {manifest.relative_to(REPOSITORY)}\n" in manifest.read_text("utf-8")
