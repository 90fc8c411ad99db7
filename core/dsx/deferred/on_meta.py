"""Operations on the meta device, whatever device was asked for: they have shapes and dtypes, and no memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

META = torch.device("meta")
T = TypeVar("T")


class OnMeta(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within the context every tensor that is made is on the meta device.

    Operations that mix such tensors with real ones see only the sizes of these. What has nothing to do with a tensor
    without memory, such as a copy of a real one, is done for real.
    Raises torch's own errors, with a note, where an operation needs values.

    keeps  whether operations are kept, to be done for real later
    """

    keeps = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: what keeps the compiler from tracing the mode imports it, for 2 seconds and 70 MB."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not concerns_meta(func, args, kwargs):
            return func(*args, **kwargs)
        if any(not tensor.is_meta for tensor in written(func, args, kwargs)):
            raise noted(RuntimeError(f"{func} would write what has no values into a tensor that has"), func)
        try:
            return without_memory(func, *mapped(Tensor, meta_like, (args, kwargs)))
        except (NotImplementedError, RuntimeError) as error:
            raise noted(error, func) from None


def keeping() -> bool:
    """Whether operations are kept here: within `dsx.empty_init`."""
    return any(isinstance(mode, OnMeta) and mode.keeps for mode in _get_current_dispatch_mode_stack())


def each(kind: type[T], value: Any) -> list[T]:
    """Everything of a kind in the arguments or results of operations: in lists, tuples and mappings."""
    found: list[T] = []
    _collect(kind, value, found)
    return found


def _collect(kind: type[T], value: Any, found: list[T]) -> None:
    """A list that is passed on, and no question about what holds nothing: this is done for every operation."""
    if isinstance(value, kind):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(kind, item, found)
    elif type(value) not in _SCALARS and isinstance(value, Mapping):
        for item in value.values():
            _collect(kind, item, found)


_SCALARS = frozenset((type(None), bool, int, float, str, torch.dtype, torch.device))


def mapped(kind: type[T], change: Callable[[T], Any], value: Any) -> Any:
    """Arguments or results with everything of a kind changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, Mapping):
        return {name: mapped(kind, change, item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([mapped(kind, change, item) for item in value])
    return value


@cache
def makes_memory(func: Any) -> bool:
    """Whether the caller of an operation chooses the device of its result."""
    named = any(argument.name == "device" for argument in func._schema.arguments)
    return named or func is torch.ops.aten.lift_fresh.default  # the last step of torch.tensor(...)


@cache
def _written(func: Any) -> Sequence[tuple[int, str]]:
    """(place, name) of the arguments that an operation writes into."""
    arguments = enumerate(func._schema.arguments)
    return [(place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write]


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The arguments that an operation writes into."""
    given = [args[place] if place < len(args) else kwargs.get(name) for place, name in _written(func)]
    return each(Tensor, given)


def concerns_meta(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation makes a tensor from nothing, or has one without memory among its arguments."""
    return makes_memory(func) or any(tensor.is_meta for tensor in each(Tensor, (args, kwargs)))


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor of the same sizes without memory; itself if it has none."""
    if tensor.is_meta:
        return tensor
    if tensor.layout != torch.strided:
        return tensor.to(META)
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)


def without_memory(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Do an operation on tensors without memory; its device and generator, which belong to real ones, are left out."""
    changed = dict(kwargs)
    if func is torch.ops.aten.lift_fresh.default:
        return args[0]
    if makes_memory(func):
        changed["device"] = META
        changed.pop("pin_memory", None)
    if "generator" in changed:
        changed["generator"] = None
    return func(*args, **changed)


def noted(error: Exception, func: Any) -> Exception:
    """The error with a note on what the operation lacks."""
    error.add_note(f"{func} was called on tensors of a model that has no memory yet, only shapes and dtypes")
    return error
