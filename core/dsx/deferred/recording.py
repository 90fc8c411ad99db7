"""`empty_init`: a model is built without memory, and what its constructor does is kept for later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dsx.deferred.asked import Asked
from dsx.deferred.guard import guarded_at_exit
from dsx.deferred.on_meta import META, OnMeta, concerns_meta, each, keeping, mapped, meta_like, without_memory, written
from dsx.deferred.promise import Draw, Given, Promise, Step, View, asked_device, promise, promise_of, promised
from dsx.deferred.replay import default_generator, real_now

aten = torch.ops.aten
_EMPTY = frozenset(
    (
        *(aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default),
        *(aten.new_empty_strided.default, aten.empty_permuted.default),
    )
)
"""What makes memory and writes nothing."""

_FILL = frozenset(
    (
        *(aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default),
        *(aten.normal_.default, aten.uniform_.default, aten.exponential_.default, aten.geometric_.default),
        *(aten.random_.default, aten.random_.to, getattr(aten.random_, "from"), aten.bernoulli_.float),
        *(aten.bernoulli_.Tensor, aten.log_normal_.default, aten.cauchy_.default),
    )
)
"""What overwrites its first argument without reading it."""

_SET_STORAGE = frozenset((aten.set_.source_Storage, aten.set_.source_Storage_storage_offset))
_CPU = torch.device("cpu")


@contextmanager
def empty_init() -> Iterator[None]:
    """Build a model without memory: `with dsx.empty_init(): model = Model(...)`.

    `dsx.prepare` then gives its parameters, buffers and other tensors their values, one unit of the model at a time:
    those that the constructor would have given them or, with `weights=`, those of a file. Random numbers that are drawn
    within and afterwards are those of the real constructor. Until then its tensors are on the meta device; changing
    them outside such a context raises `DsxError`.
    """
    if keeping():
        yield
        return
    asked = Asked()
    with guarded_at_exit(), Recording(asked), asked:
        yield


class Recording(OnMeta):  # type: ignore[no-untyped-call]
    """Everything is on the meta device, and each operation that makes or changes memory is kept by what it changes.

    Random numbers are drawn as if it were for real, and dropped; so those that are drawn later are right. What needs
    values, such as `item()`, gets them.
    """

    keeps = True

    def __init__(self, asked: Asked) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._asked = asked
        self._scratch: dict[torch.device, Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._do(func, tuple(args), dict(kwargs or {}))

    def _do(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not concerns_meta(func, args, kwargs):
            return func(*args, **kwargs)
        if func in _SET_STORAGE and args[1].device.type != "meta":
            args = (args[0], _mirror(args[1]), *args[2:])
        targets = written(func, args, kwargs)
        if _needs_values(func) or any(not target.is_meta for target in targets):
            return _for_real(func, args, kwargs)
        device = _device(args, kwargs, self._asked.meta_meant)
        if "device" in kwargs:
            kwargs["device"] = device
        draw, drawn = self._draw(func, args, kwargs, device)
        taken: tuple[Any, Any] = mapped(Tensor, _taken, (args, _without_generator(kwargs)))
        if draw is None:
            result = _sketch(func, args, kwargs, targets, device)
        else:
            result = targets[0] if targets else mapped(Tensor, meta_like, drawn)
        changed = [] if torch.Tag.inplace_view in func.tags else [promised(target) for target in targets]
        _keep(func, taken, draw, result, changed, device)
        return result

    def _draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
    ) -> tuple[Draw | None, Any]:
        """Let the generator go on as if the operation were done; its state before, and the result."""
        takes = any(argument.name == "generator" for argument in func._schema.arguments)
        if device == META or not (takes or torch.Tag.nondeterministic_seeded in func.tags):
            return None, None
        given = kwargs.get("generator")
        generator = default_generator(device) if given is None else given
        draw = Draw(generator.device, generator.get_state(), given is not None)
        if func in _FILL:
            args = (self._room(args[0], device), *args[1:])
        return draw, _for_real(func, args, kwargs)

    def _room(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Memory like a tensor's, with any content, in the same place each time: a heap would be left with holes."""
        size = tensor.untyped_storage().nbytes()
        room = self._scratch.get(device)
        if room is None or room.numel() < size:
            self._scratch.pop(device, None)
            room = self._scratch[device] = torch.empty(size, dtype=torch.uint8, device=device)
        return View.of(tensor).on(room)


def _sketch(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], targets: Sequence[Tensor], device: torch.device
) -> Any:
    """The result without memory, also of operations whose shapes depend on values or that need real tensors."""
    if func in _FILL and device == META:
        return targets[0]
    try:
        return without_memory(func, *mapped(Tensor, meta_like, (args, kwargs)))
    except NotImplementedError:
        if device == META:
            raise
        return targets[0] if targets else mapped(Tensor, meta_like, _for_real(func, args, kwargs))


def _keep(
    func: Any,
    taken: tuple[Any, Any],
    draw: Draw | None,
    result: Any,
    changed: Sequence[Promise],
    device: torch.device,
) -> None:
    """Append a step to the memory that it makes or changes."""
    args, kwargs = taken
    step = Step(func, args, kwargs, torch.get_default_dtype(), draw, _filled(func, args))
    fresh = []
    for tensor in each(Tensor, result):
        known = promise_of(tensor)
        if known is None:
            fresh.append(promise(tensor.untyped_storage(), device))
        else:
            known.size = max(known.size, tensor.untyped_storage().nbytes())
        step.made.append(View.of(tensor) if known is None else None)
    for memory in () if func in _EMPTY else (*fresh, *changed):
        if memory.device != META:
            memory.steps.append(step)


def _filled(func: Any, args: Sequence[Any]) -> Promise | None:
    return args[0].promise if func in _FILL and args[0].covers else None


def _needs_values(func: Any) -> bool:
    """Whether its result is a number."""
    return torch.Tag.data_dependent_output in func.tags


def _taken(tensor: Tensor) -> View | Given:
    return View.of(tensor) if tensor.is_meta else Given(tensor)


def _for_real(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args, kwargs = real_now((args, kwargs))
    return func(*args, **kwargs)


def _without_generator(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Replayed with another one, in the same state."""
    return {name: None if name == "generator" else value for name, value in kwargs.items()}


def _device(args: Sequence[Any], kwargs: Mapping[str, Any], meta_meant: bool) -> torch.device:
    """On which device the operation would be done."""
    asked = kwargs.get("device")
    if asked is not None and (asked != META or meta_meant):
        return torch.device(asked)
    devices = [asked_device(tensor) for tensor in each(Tensor, (args, kwargs))]
    return next((device for device in devices if device != _CPU), _CPU)


def _mirror(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Promised memory with what is in a real storage, as `torch.load` makes them."""
    mirror: torch.UntypedStorage | None = getattr(storage, "dsx_mirror", None)
    if mirror is None:
        mirror = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
        storage.dsx_mirror = mirror  # type: ignore[attr-defined]
        content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        like = torch.empty(0, dtype=torch.uint8, device="meta").set_(mirror)
        _keep(aten.clone.default, ((Given(content),), {}), None, like, (), storage.device)
    return mirror
