"""Parameters whose memory was given back: what can be known without it is answered, all else is an error in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dsx.contracts import Flat
from dsx.errors import DsxError

_KNOWN = frozenset(
    (
        *("shape", "size", "dim", "ndim", "numel", "nelement", "stride", "dtype", "device", "layout", "is_contiguous"),
        *("element_size", "itemsize", "nbytes", "is_floating_point", "is_complex", "is_quantized", "is_sparse"),
        *("is_cpu", "is_cuda", "is_meta", "requires_grad", "requires_grad_", "grad", "grad_fn", "is_leaf", "_version"),
        *("register_hook", "register_post_accumulate_grad_hook"),
    )
)


class Released(nn.Parameter):
    """What a parameter is while its unit is not gathered: an operation on it would read memory that is not there, and
    end the process."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)  # a property's, or a function's
        if name in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = [f"'{value.dsx_name}'" for value in _flatten([args, kwargs]) if isinstance(value, Released)]
        raise DsxError(
            f"the weight {' and '.join(names)} was used outside its module's forward: `{name}`",
            found="a rank holds 1/N of it between uses",
            remedy=f"with engine.gathered({names[0]}): ... (modify=True to change it); engine.weights() gives all",
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Parameter '{self.dsx_name}' {list(self.shape)}, {self.dtype}, in shards: use engine.gathered()"

    dsx_name: str


def _flatten(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [item for inner in value.values() for item in _flatten(inner)]
    if isinstance(value, (tuple, list)):
        return [item for inner in value for item in _flatten(inner)]
    return [value]


def release(flat: Flat) -> None:
    """Guard the parameters of a flat one. A subclass of the user's own is left as it is."""
    for segment, parameter in zip(flat.segments, flat.parameters, strict=True):
        if type(parameter) is nn.Parameter:
            parameter.dsx_name = segment.name  # type: ignore[attr-defined]
            parameter.__class__ = Released


def restore(flat: Flat) -> None:
    """Make them parameters again."""
    for parameter in flat.parameters:
        if type(parameter) is Released:
            parameter.__class__ = nn.Parameter  # type: ignore[assignment]
