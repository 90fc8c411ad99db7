"""Changes of a model that has no memory yet are refused, outside the context that would keep them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from dsx.deferred.held import held
from dsx.deferred.on_meta import keeping
from dsx.deferred.promise import promise_of
from dsx.errors import DsxError

_KNOWN = frozenset(
    (
        *("shape", "size", "dim", "ndim", "numel", "nelement", "stride", "storage_offset", "dtype", "device", "layout"),
        *("is_contiguous", "element_size", "itemsize", "nbytes", "is_floating_point", "is_complex", "is_quantized"),
        *("is_sparse", "is_cpu", "is_cuda", "is_meta", "is_leaf", "requires_grad", "requires_grad_", "grad", "grad_fn"),
        *("untyped_storage", "is_conj", "is_neg", "_version", "__len__", "__repr__", "__hash__"),
    )
)


class _Guard:
    """What tensors are between `empty_init` and `prepare`: an operation on them would be done on shapes, and lost."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)  # a property's, or a function's
        if name in _KNOWN or keeping():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise DsxError(
            f"`{name}` was called on a tensor of a model that has no memory yet",
            where="between dsx.empty_init() and dsx.prepare",
            remedy="do it within `with dsx.empty_init():`, or after dsx.prepare; a device is given to dsx.prepare",
        )


class _GuardedParameter(_Guard, nn.Parameter):
    pass


class _GuardedTensor(_Guard, Tensor):
    pass


_GUARDS: Mapping[type, type] = {nn.Parameter: _GuardedParameter, Tensor: _GuardedTensor}


@contextmanager
def guarded_at_exit() -> Iterator[None]:
    """When the context is left, guard the tensors of all modules to which something was attached in it."""
    modules: dict[int, nn.Module] = {}

    def note(module: nn.Module, name: str, value: object) -> None:
        modules[id(module)] = module

    with ExitStack() as stack:
        for register in (
            register_module_parameter_registration_hook,
            register_module_buffer_registration_hook,
            register_module_module_registration_hook,
        ):
            stack.callback(register(note).remove)
        yield
    for _, tensor in held(list(modules.values())):
        if type(tensor) in _GUARDS and tensor.is_meta and promise_of(tensor) is not None:
            tensor.__class__ = _GUARDS[type(tensor)]


def unguard(model: nn.Module) -> None:
    """Make the model's tensors again what they were."""
    plain = {guard: kind for kind, guard in _GUARDS.items()}
    for _, tensor in held(model):
        if type(tensor) in plain:
            tensor.__class__ = plain[type(tensor)]
