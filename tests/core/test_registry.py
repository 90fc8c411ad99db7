"""Installed plugins are found without importing them; a broken one is named and breaks nothing else."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from broken_plugins import CASES, HOME, install
from dsx.cli import call
from dsx.entries import COMMANDS, PLUGINS, Entries
from dsx.errors import PluginInvalid, PluginNotFound, SlotConflict
from dsx.registry import Registry

INVALID = {
    "import_error": ["cannot be imported", "No module named 'a_package_that_is_not_installed'", "Traceback"],
    "syntax_error": ["cannot be imported", "SyntaxError", "broken_syntax_error.py", "Traceback"],
    "exits": ["cannot be imported", "SystemExit: this plugin wants a licence", "Traceback"],
    "no_attribute": ["cannot be imported", "has no attribute 'Plugin'"],
    "no_descriptor": ["has no descriptor", "give it an attribute `descriptor`"],
    "old_contract": ["version 99 of the contracts, this is version 1", "install a version of it that matches"],
    "other_name": ["calls itself 'another_name'", "one name"],
    "unknown_section": ["names a section 'optimization'", "use one of precision", "optimize"],
    "plain_options": ["has options <class", "attrs class"],
}


@pytest.mark.parametrize(("name", "words"), INVALID.items(), ids=INVALID)
def test_plugin_that_cannot_be_used_is_named_with_its_distribution(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, name)
    with pytest.raises(PluginInvalid) as caught:
        Registry.scan().load(name)
    text = str(caught.value)
    assert text.startswith(f"the plugin '{name}' ")
    assert f"broken-{name.replace('_', '-')} 1.0" in text
    for word in words:
        assert word in text


def test_traceback_of_a_failing_import_ends_in_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "import_error")
    with pytest.raises(PluginInvalid) as caught:
        Registry.scan().load("import_error")
    place = f'File "{HOME / "import_error" / "broken_import_error.py"}", line 3'
    assert place in str(caught.value)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_scan_imports_no_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, *CASES)
    before = set(sys.modules)
    names = Registry.scan().entries.names()
    assert {"adamw", "import_error", "syntax_error", "twin"} <= set(names)
    assert not [name for name in set(sys.modules) - before if name.startswith("broken_")]


def test_load_imports_only_the_plugin_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "rivals", "import_error")
    plugin = Registry.scan().load("first")
    assert (plugin.name, plugin.descriptor.section) == ("first", "optimize")
    assert "broken_second" not in sys.modules


def test_missing_plugin_gives_near_names_group_and_hint() -> None:
    """Case 108: a package named in a manifest that is not installed."""
    with pytest.raises(PluginNotFound) as caught:
        Registry.scan().load("adamv", where="'adamv' in optimize.use (run.toml:3)")
    text = str(caught.value)
    assert "no installed package registers the plugin 'adamv'" in text
    assert "run.toml:3" in text
    assert "an entry point 'adamv' in the group dsx.plugins" in text
    assert "near names: adamw" in text
    assert "install the package that brings it" in text


def test_two_distributions_of_one_name_are_both_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 109: which of them is meant cannot be known."""
    install(monkeypatch, "twins")
    with pytest.raises(SlotConflict) as caught:
        Registry.scan().load("twin")
    text = str(caught.value)
    assert "two installed packages register the plugin 'twin'" in text
    assert "broken-twin-north 1.0" in text
    assert "broken-twin-south 1.0" in text
    assert "uninstall one of them" in text


def test_unreadable_entry_points_of_one_distribution_hide_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "unreadable", "rivals")
    entries = Entries.scan(PLUGINS)
    assert {"adamw", "first", "second"} <= set(entries.names())
    (note,) = entries.notes
    assert "broken_unreadable-1.0.dist-info/entry_points.txt" in note
    with pytest.raises(PluginNotFound, match=r"broken_unreadable-1\.0\.dist-info"):
        entries.find("lost")


def test_name_twice_in_one_file_is_noted_and_hides_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    site = tmp_path_factory.mktemp("site")
    info = site / "broken_double-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-double\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[dsx.plugins]\ndouble = broken_double\ndouble = broken_double\n")
    monkeypatch.syspath_prepend(site)
    entries = Entries.scan(PLUGINS)
    assert {"adamw", "double"} <= set(entries.names())
    assert "option 'double' in section 'dsx.plugins' already exists" in entries.notes[0]


def test_folder_name_that_is_not_normalised_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`my-plug-1.0.dist-info` reads as a distribution `my` to `entrypoints`, which then drops the second `my-*`."""
    site = tmp_path_factory.mktemp("site")
    for name in ("my-plug", "my-other"):
        info = site / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[dsx.plugins]\n{name} = {name.replace('-', '_')}\n")
    monkeypatch.syspath_prepend(site)
    assert {"my-plug", "my-other"} <= set(Entries.scan(PLUGINS).names())


def test_list_shows_everything_while_broken_plugins_are_installed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, *CASES)
    assert call(["plugins"]) == 0
    shown = capsys.readouterr()
    for name in ("adamw", "import_error", "syntax_error", "exits"):
        assert name in shown.out
    assert "broken-twin-north 1.0" in shown.out
    assert "note: a distribution's entry points cannot be read" in shown.err
    assert call(["plugins", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"name": "first", "target": "broken_first", "distribution": "broken-first 1.0"} in listed


def test_other_commands_go_on_beside_a_broken_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, "import_error", "syntax_error", "commands", "unreadable")
    assert call(["--help"]) == 0
    assert "whisper" in capsys.readouterr().out
    assert call(["plugins", "check", "adamw"]) == 0
    assert "fills      rule" in capsys.readouterr().out
    assert call(["plugins", "check", "import_error"]) == 2
    assert "the plugin 'import_error' cannot be imported" in capsys.readouterr().err


def test_command_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, "commands")
    assert {"shout", "whisper"} <= set(Entries.scan(COMMANDS).names())
    for name, words in (("shout", "is not a click command"), ("whisper", "cannot be imported")):
        assert call([name]) == 2
        text = capsys.readouterr().err
        assert words in text
        assert "broken-commands 1.0" in text


def test_listing_does_not_wait_for_torch() -> None:
    script = "import sys; from dsx.cli import call; call(['plugins']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
