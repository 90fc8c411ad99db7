"""Who fills which role is decided from data; whatever cannot work is refused, with names, lines and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from broken_plugins import install
from dsx.errors import CapabilityMissing, DsxError, ManifestError, PluginInvalid, PluginNotFound, SlotConflict
from dsx.manifest import Manifest
from dsx.registry import Registry
from dsx.resolve import NULL_OFFERS, Resolved, resolve
from dsx.roles import BUILD_ORDER


def resolved(text: str, folder: Path) -> Resolved:
    path = folder / "run.toml"
    path.write_text(text)
    return resolve(Manifest.load(path), Registry.scan())


def refused(kind: type[DsxError], text: str, folder: Path) -> str:
    with pytest.raises(kind) as caught:
        resolved(text, folder)
    assert type(caught.value) is kind
    return str(caught.value)


def test_empty_manifest_leaves_every_role_to_its_null_part(tmp_path: Path) -> None:
    found = resolved("", tmp_path)
    assert found.plugins == ()
    assert found.names() == {role.name: () for role in BUILD_ORDER}
    assert found.offers() == frozenset().union(*NULL_OFFERS.values())


def test_plugin_takes_its_role_and_the_null_parts_offers_go(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "displaced")
    found = resolved('[partition]\nuse = ["sharded"]\n', tmp_path)
    assert found.names()["layout"] == ("sharded",)
    assert found.fillers["layout"][0].where.startswith("'sharded' in partition.use (")
    assert found.offers().isdisjoint(NULL_OFFERS["layout"])


def test_two_fillers_of_one_role_are_named_with_their_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "rivals")
    text = refused(SlotConflict, '[run]\nsteps = 3\n\n[optimize]\nuse = ["first", "second"]\n', tmp_path)
    assert "'first' and 'second' both fill the role 'schedule'" in text
    assert text.count(f"{tmp_path / 'run.toml'}:5") == 2
    assert "keep one of them in [optimize]" in text


def test_need_that_nothing_offers_is_named_with_its_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "needy")
    text = refused(CapabilityMissing, '[optimize]\nuse = ["needy"]\n', tmp_path)
    assert "'needy' needs 'moon.phase', which nothing in this run offers: rates follow the tides" in text
    assert f"{tmp_path / 'run.toml'}:2" in text
    assert "offered in this run: gradients.early, gradients.local, optimizer.whole, parameter.whole" in text
    assert "add a plugin that offers it" in text


def test_need_that_a_displaced_null_part_would_meet_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "displaced")
    assert resolved('[optimize]\nuse = ["displaced"]\n', tmp_path).names()["schedule"] == ("displaced",)
    text = refused(CapabilityMissing, '[optimize]\nuse = ["displaced"]\n[partition]\nuse = ["sharded"]\n', tmp_path)
    assert "'displaced' needs 'gradients.local'" in text
    assert "core's own layout offers it: remove 'sharded' from [partition], or 'displaced'" in text


@pytest.mark.parametrize(("name", "role"), [("unknown_role", "scheduler"), ("foreign_role", "layout")])
def test_role_that_its_section_has_not(name: str, role: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, name)
    text = refused(PluginInvalid, f'[optimize]\nuse = ["{name}"]\n', tmp_path)
    assert f"the plugin '{name}' fills a role '{role}'" in text
    assert f"from broken-{name.replace('_', '-')} 1.0" in text
    assert "the roles of [optimize] are groups, rule, stepper, schedule" in text


def test_fills_that_raise_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "fills_raise")
    text = refused(PluginInvalid, '[optimize]\nuse = ["fills_raise"]\n', tmp_path)
    assert "cannot say what it fills: KeyError: 'every'" in text
    assert "broken_fills_raise.py" in text


def test_plugin_in_a_section_that_is_not_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "rivals")
    text = refused(SlotConflict, '[precision]\nuse = ["first"]\n', tmp_path)
    assert "the plugin 'first' does not belong in [precision]" in text
    assert "name it in [optimize]" in text
    assert "run.toml:2" in text


def test_plugin_that_is_not_installed_is_named_with_its_line(tmp_path: Path) -> None:
    """Case 108: never disabled silently."""
    text = refused(PluginNotFound, '[optimize]\nuse = [\n  "adamw",\n  "warmup_cosin",\n]\n', tmp_path)
    assert "no installed package registers the plugin 'warmup_cosin'" in text
    assert "run.toml:2" in text
    assert "near names: warmup_cosine" in text
    assert "in the group dsx.plugins" in text


def test_name_of_two_distributions_is_refused_with_the_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Case 109."""
    install(monkeypatch, "twins")
    text = refused(SlotConflict, '[optimize]\nuse = ["twin"]\n', tmp_path)
    assert "broken-twin-north 1.0) and twin (broken_twin_south, from broken-twin-south 1.0" in text
    assert "run.toml:2" in text


def test_broken_plugin_that_no_manifest_names_breaks_no_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, "import_error", "syntax_error", "twins", "unreadable")
    assert resolved('[optimize]\nuse = ["adamw"]\n', tmp_path).names()["rule"] == ("adamw",)


def test_problems_in_options_of_all_plugins_come_at_once(tmp_path: Path) -> None:
    text = refused(
        ManifestError,
        '[optimize]\nuse = ["adamw"]\n[optimize.adamw]\nlr = -1\n[observe]\nuse = ["progress"]\n'
        "[observe.progress]\nevry = 5\n",
        tmp_path,
    )
    assert "run.toml:4: optimize.adamw.lr" in text
    assert "run.toml:8: observe.progress.evry: unknown key; did you mean 'every'?" in text
