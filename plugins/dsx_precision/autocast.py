"""Plugin `autocast`: fp32 parameters and gradients, and 16-bit products chosen by torch.autocast."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsx.contracts import Dtypes
from dsx.plugin import Descriptor, Fill, Need, Part, hook
from dsx_precision.guard import guard
from dsx_precision.products import PRODUCTS
from dsx_precision.scaling import SCALED, why


@frozen(kw_only=True)
class Options:
    """`[precision.autocast]`.

    dtype  of matrix products and what else torch lists as safe; float16 needs a loss scale
    """

    dtype: Literal["bfloat16", "float16"] = "bfloat16"


class Autocast(Dtypes):
    """The model's forward within torch.autocast.

    Every parameter keeps its dtype. A 16-bit copy of a weight lives from its use in forward to its backward, and
    float64 models are computed in float64.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device.type, dtype

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._casting():
            return model(*args, **kwargs)

    def _casting(self) -> AbstractContextManager[object]:
        return OnPaper(self._dtype) if self._device == "meta" else torch.autocast(self._device, self._dtype)


class OnPaper(TorchFunctionMode):
    """For plans, on the meta device, which torch.autocast does not know: products take their fp32 operands in `dtype`.
    What else torch lists keeps the dtype that it gets."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in PRODUCTS:
            return func(*args, **kwargs)
        return func(*map(self._cast, args), **{name: self._cast(value) for name, value in kwargs.items()})

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.dtype == torch.float32 else value


def _fills(options: Options) -> Mapping[str, Fill]:
    needs = [Need(SCALED, why("autocast"))] if options.dtype == "float16" else []
    return {"dtypes": Fill(needs=needs), "guard": Fill()}


descriptor = Descriptor(
    name="autocast",
    section="precision",
    contract=1,
    options=Options,
    fills=_fills,
    summary="fp32 parameters, 16-bit products where torch.autocast sees fit",
)


@hook
def dsx_precision(options: Options) -> list[Part]:
    dtype: torch.dtype = getattr(torch, options.dtype)
    return [Part("dtypes", lambda ctx: Autocast(ctx.plan.device, dtype)), guard()]
