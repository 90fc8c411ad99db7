"""What tensors without memory say of themselves while a model is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsx.deferred.promise import asked_device
from dsx.deferred.replay import real_now


class Asked(TorchFunctionMode):
    """Tensors answer as real ones would: which device they are on, and as lists and arrays of numbers.

    meta_meant  the operation under way was asked for on the meta device, not only on that of another tensor
    """

    def __init__(self) -> None:
        super().__init__()
        self.meta_meant = False

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _ANSWERS or func in _NUMBERS:
            with torch._C.DisableTorchFunction():
                tensor = args[0]
                if tensor.is_meta and func in _ANSWERS:
                    return _ANSWERS[func](asked_device(tensor))
                if tensor.is_meta:
                    args = tuple(real_now(args))
        kwargs = kwargs or {}
        if not any(_is_meta(value) for value in (*args, *kwargs.values())):
            return func(*args, **kwargs)
        self.meta_meant = True
        try:
            return func(*args, **kwargs)
        finally:
            self.meta_meant = False


def _is_meta(value: Any) -> bool:
    """Whether an argument is the meta device, or names it."""
    return isinstance(value, (torch.device, str)) and str(value) == "meta"


_ANSWERS: Mapping[Any, Any] = {
    Tensor.device.__get__: lambda device: device,
    Tensor.is_meta.__get__: lambda device: device.type == "meta",  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__: lambda device: device.type == "cpu",  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__: lambda device: device.type == "cuda",  # type: ignore[attr-defined]
}
_NUMBERS = frozenset((Tensor.tolist, Tensor.numpy, Tensor.__array__))
