"""What is changed in a model behind the engine's back, after set-up, is named instead of being lost."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from operator import attrgetter, not_
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from dsx.compiled import refuse_compiled
from dsx.contracts import Layout, Store, memory_of
from dsx.errors import DsxError
from dsx.units import trainable

SLICE = 128
"""Parameters looked at in one update, so that watching costs the same for any model, some 10 us."""

Named = tuple[str, nn.Parameter]


class Watch:
    """Notices parameters that were attached, replaced, removed, moved, frozen, or edited in vain since set-up.

    attached  something may have been attached to the model since it was last walked over

    Edits in place are in vain where the parameter is only a copy of the authoritative weight. Those made through
    `.data` cannot be seen.
    """

    def __init__(self, model: nn.Module, layout: Layout, store: Store) -> None:
        self._model, self._layout = model, layout
        self._names = _names(model)
        self._modules = weakref.WeakSet(model.modules())
        self._trained = list(trainable(model).items())
        fixed, copies = _kinds(layout, store)
        self._places = Slices(fixed, nn.Parameter.data_ptr)
        self._versions = Slices(copies, attrgetter("_version"))
        self.attached = True  # for the first forward
        _listen(self)

    def look(self) -> None:
        """Raise `DsxError` for what was changed; once in each update."""
        if self.attached:
            self.walk()
        if name := self._versions.changed():
            raise DsxError(
                f"the parameter '{name}' was edited in place, which the next update undoes",
                found="its weight is kept apart from the model: in more bits, or cut into shards",
                remedy=f'edit it within `with engine.gathered("{name}", modify=True):`, or before dsx.prepare',
            )
        if name := self._places.changed():
            raise DsxError(
                f"the parameter '{name}' was moved to other memory after set-up, where nothing trains it",
                expected="no model.to(...), model.half() or `parameter.data = ...` after dsx.prepare",
                remedy=f"do it before; edit weights in place, within `with engine.gathered({name!r}, modify=True):`",
            )

    def walk(self) -> None:
        """Raise `DsxError` if the model's parameters are not those of set-up, or it was compiled; costs a walk over it.

        Made at the first forward, and when something was attached.
        """
        now = _names(self._model)
        for name in [*now, *self._names]:
            if self._names.get(name) != now.get(name):
                raise _another(name, self._names, now)
        refuse_compiled(self._model, self._layout)
        self._modules.update(self._model.modules())
        self.attached = False

    def unused(self, used: Sequence[bool]) -> None:
        """Raise `DsxError` if a parameter without a gradient was frozen; `used` by number of the parameter."""
        for name, parameter in compress(self._trained, map(not_, used)):
            if not parameter.requires_grad:
                raise DsxError(
                    f"the parameter '{name}' was frozen after set-up",
                    expected="requires_grad as it was in dsx.prepare",
                    remedy="freeze it before, or keep gradients from it: without one a parameter is left alone",
                )

    def accept(self, names: Sequence[str]) -> None:
        """Edits of these parameters were seen to."""
        self._versions.accept(names)

    def told(self, module: nn.Module) -> None:
        """Something was attached to a module, the model's or another's."""
        if module in self._modules:
            self.attached = True

    def close(self) -> None:
        """The model may be changed."""
        _WATCHES.discard(self)


class Slices:
    """Compares one number of each parameter with what it was, some parameters at a time."""

    def __init__(self, named: Sequence[Named], number: Callable[[nn.Parameter], int]) -> None:
        self._names = [name for name, _ in named]
        self._parameters = [parameter for _, parameter in named]
        self._number = number
        self._numbers = self._of(self._parameters)
        self._at = 0

    def _of(self, parameters: Sequence[nn.Parameter]) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # neither number needs a parameter's memory to be there
            return list(map(self._number, parameters))

    def changed(self) -> str | None:
        """Name of a parameter in the next slice whose number is another one."""
        here = slice(self._at, self._at + SLICE)
        self._at = here.stop if here.stop < len(self._names) else 0
        now, before = self._of(self._parameters[here]), self._numbers[here]
        if now == before:
            return None
        return next(name for name, a, b in zip(self._names[here], now, before, strict=True) if a != b)

    def accept(self, names: Sequence[str]) -> None:
        """The numbers of these parameters are right as they are."""
        wanted = set(names)
        for at, name in enumerate(self._names):
            if name in wanted:
                (self._numbers[at],) = self._of([self._parameters[at]])


_WATCHES: weakref.WeakSet[Watch] = weakref.WeakSet()


def _listen(watch: Watch) -> None:
    """Have torch tell the watch of everything attached anywhere; hooks that came and went with a watch could go while
    torch walks over them."""
    if not _listening:
        _listening.append(register_module_parameter_registration_hook(_attached))
        _listening.append(register_module_module_registration_hook(_attached))
    _WATCHES.add(watch)


_listening: list[Any] = []


def _attached(module: nn.Module, name: str, value: object) -> None:
    for watch in _WATCHES:
        watch.told(module)


def _names(model: nn.Module) -> Mapping[str, int]:
    return {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}


def _kinds(layout: Layout, store: Store) -> tuple[list[Named], list[Named]]:
    """Parameters that stay in one place, and those that are copies of the authoritative weight."""
    fixed: list[Named] = []
    copies: list[Named] = []
    targets = {shard.flat: layout.target(shard) for shard in layout.shards}
    for unit in layout.units:
        for flat in unit.flats:
            home = targets[flat] if flat.trainable else layout.resting(flat)
            stays = home is not None and memory_of(home) == memory_of(flat.parameters[0])
            named = [(segment.name, p) for segment, p in zip(flat.segments, flat.parameters, strict=True)]
            if stays:
                fixed += named
            if not stays or "master" in store.names(flat.key):
                copies += named
    return fixed, copies


def _another(name: str, before: Mapping[str, int], now: Mapping[str, int]) -> DsxError:
    if name not in now:
        what, remedy = "removed from", "remove it before dsx.prepare"
    elif name in before:
        what = "replaced in"
        remedy = f'edit it in place, within `with engine.gathered("{name}", modify=True):`, or replace it before'
    else:
        what, remedy = "attached to", "attach it before dsx.prepare, or end this engine with close() and prepare again"
    return DsxError(f"the parameter '{name}' was {what} the model after set-up", remedy=remedy)
