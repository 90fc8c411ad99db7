"""A plugin whose hook breaks the contract is refused at set-up, by name and distribution."""

from __future__ import annotations

import pytest
from torch import nn

import dsx
from broken_plugins import install
from dsx.errors import DsxError, PluginInvalid

BROKEN = {
    "no_hook": ["has no hook dsx_optimize", "mark a function dsx_optimize with dsx.plugin.hook"],
    "other_hook": ["has no hook dsx_optimize"],
    "misspelt_hook": ["unknown hook 'dsx_optimise'", "the hooks are dsx_precision"],
    "unknown_argument": ["Argument(s) {'settings'}", "may take `options` and `plan`"],
    "wraps": ["wraps the hook dsx_optimize", "a part may wrap another"],
    "hook_raises": ["fails in its hook: no table of rates was found", "Traceback", "broken_hook_raises.py"],
    "no_part": ["Schedule object", "return a list of Part"],
    "no_list": ["'Part' object is not iterable"],
    "returns_none": ["returns parts for no role", "its descriptor fills schedule"],
    "broken_promise": ["returns parts for groups", "its descriptor fills schedule: make the two agree"],
}


@pytest.mark.parametrize(("name", "words"), BROKEN.items(), ids=BROKEN)
def test_hook_that_breaks_the_contract(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, name)
    with pytest.raises(PluginInvalid) as caught:
        dsx.prepare(nn.Linear(2, 2), {"optimize": {"use": [name]}})
    text = str(caught.value)
    assert text.startswith(f"the plugin '{name}' ")
    assert f"from broken-{name.replace('_', '-')} 1.0" in text
    for word in words:
        assert word in text


def test_the_same_plugin_without_its_fault_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "rivals")
    engine = dsx.prepare(nn.Linear(2, 2), {"optimize": {"use": ["first"]}})
    engine.close()


def test_what_a_hook_refuses_on_purpose_is_shown_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "refuses")
    with pytest.raises(DsxError) as caught:
        dsx.prepare(nn.Linear(2, 2), {"optimize": {"use": ["refuses"]}})
    assert str(caught.value) == "the tide table ends in 1999\n  remedy: name a newer one"
