"""Numbers that are read on the host, of tensors that have none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class Lists(TorchFunctionMode):
    """`tolist` of a tensor on the meta device: each number is the one that the ledger has for a single one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.tolist and args[0].is_meta:
            return _filled(args[0].shape, args[0].flatten()[0].item() if args[0].numel() else None)
        return func(*args, **(kwargs or {}))


def _filled(shape: Sequence[int], value: Any) -> Any:
    return [_filled(shape[1:], value) for _ in range(shape[0])] if shape else value
