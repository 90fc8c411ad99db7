"""Training calls no hook and imports nothing: hooks are for set-up, and the engine holds what they returned."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pluggy
import pytest
import torch
from attrs import frozen
from torch import Tensor, nn

import dsx
from dsx.contracts import Observer, Report
from dsx.plugin import Descriptor, Fill, Part, hook
from dsx.testing.counting import CountingPlugin

STEPS = 3

MANIFEST = {
    "run": {"steps": STEPS},
    "batch": {"accumulation": 2},
    "precision": {"use": ["bf16"]},
    "communicate": {"use": ["counting"]},
    "optimize": {"use": ["adamw", "warmup_cosine"], "clip_norm": 1.0},
    "observe": {"use": ["progress"]},
}


class Squares(nn.Module):
    """Two layers; the output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.layers(inputs)
        return result.square().mean()


@frozen
class Found:
    """Hooks called at set-up and in training; modules imported in the second and third update."""

    set_up: list[str]
    training: list[str]
    imported: set[str]


def watch(manifest: Mapping[str, Any], plugins: Mapping[str, object]) -> Found:
    """Train for three updates, noting every call of a hook, of any plugin manager, and what gets imported."""
    with hook_calls() as calls:
        engine = dsx.prepare(Squares(), manifest, plugins=plugins)
        set_up = calls.copy()
        calls.clear()
        engine.train_step(_batches(engine))
        loaded = set(sys.modules)
        for _ in range(1, STEPS):
            engine.train_step(_batches(engine))
        imported = set(sys.modules) - loaded
        assert engine.steps == STEPS
        engine.close()
    return Found(set_up, calls, imported)


def _batches(engine: dsx.Engine) -> list[Tensor]:
    return [torch.randn(4, 8) for _ in range(engine.accumulation)]


@contextmanager
def hook_calls() -> Iterator[list[str]]:
    """Names of the hooks called within the context."""
    calls: list[str] = []

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: pluggy.HookCaller, *args: Any, **kwargs: Any) -> Any:
            calls.append(self.name)
            return original(self, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("__call__", "call_extra", "call_historic"):
            patch.setattr(pluggy.HookCaller, name, noting(getattr(pluggy.HookCaller, name)))
        yield calls


class Listening:
    """A plugin whose observer calls `then` at each update."""

    descriptor = Descriptor(name="listening", section="observe", contract=1, fills={"observers": Fill()})

    def __init__(self, then: Callable[[int], object]) -> None:
        self._then = then

    @hook
    def dsx_observe(self) -> list[Part]:
        then = self._then

        class Listener(Observer):
            def report(self, report: Report) -> None:
                then(report.step)

        return [Part("observers", lambda ctx: Listener())]


def test_training_calls_no_hook_and_imports_nothing() -> None:
    modules = {
        "bf16": "dsx_precision.bf16",
        "adamw": "dsx_optimizers.adamw",
        "warmup_cosine": "dsx_schedules.warmup_cosine",
        "progress": "dsx_observe.progress",
    }
    plugins: dict[str, object] = {name: importlib.import_module(module) for name, module in modules.items()}
    found = watch(MANIFEST, plugins | {"counting": CountingPlugin()})
    assert sorted(found.set_up) == [
        "dsx_communicate",
        "dsx_observe",
        "dsx_optimize",
        "dsx_optimize",
        "dsx_precision",
    ]
    assert found.training == []
    assert found.imported == set()


def test_a_hook_called_in_training_is_noted() -> None:
    manager = pluggy.PluginManager("chatty")
    manager.add_hookspecs(Chatty)
    listening = Listening(lambda step: manager.hook.chatty_step())
    found = watch({"observe": {"use": ["listening"]}}, {"listening": listening})
    assert found.training == ["chatty_step"] * STEPS


class Chatty:
    """Hooks of a part that asks plugins at each step."""

    @pluggy.HookspecMarker("chatty")
    def chatty_step(self) -> None: ...


def test_an_import_in_training_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def then(step: int) -> None:
        if step == 2:
            importlib.import_module("colorsys")

    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    found = watch({"observe": {"use": ["listening"]}}, {"listening": Listening(then)})
    assert found.imported == {"colorsys"}
