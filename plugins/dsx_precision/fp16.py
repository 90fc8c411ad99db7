"""Plugin `fp16`: parameters, activations and gradients in float16, master weights and optimizer states in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from attrs import frozen
from torch import nn

from dsx.plugin import Context, Descriptor, Fill, Need, Part, hook
from dsx_precision.guard import guard
from dsx_precision.half import Half, HalfOptions
from dsx_precision.products import Products
from dsx_precision.scaling import SCALED, why


@frozen(kw_only=True)
class Options(HalfOptions):
    """`[precision.fp16]`.

    buffers  which floating buffers become float16: those that are saved (`persistent`), `all` or `none`. Tables that
             are not saved stay as they are: angles computed from rounded frequencies (rotary embeddings) are wrong
    keep     patterns of names of modules that compute in fp32, such as "*.router": what they are given is cast to fp32,
             and what they return back to float16
    """


class Float16(Half):
    """Mixed precision with float16, whose smallest numbers need a loss scale; on CPUs with products made in fp32."""

    def __init__(self, ctx: Context, options: Options) -> None:
        super().__init__(ctx.model, torch.float16, options.keep, "[precision.fp16] keep")
        self._products: AbstractContextManager[object] = Products() if ctx.plan.device.type == "cpu" else nullcontext()

    def call(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        with self._products:
            return super().call(model, args, kwargs)

    def backward(self) -> AbstractContextManager[object]:
        return self._products


descriptor = Descriptor(
    name="fp16",
    section="precision",
    contract=1,
    options=Options,
    fills={"dtypes": Fill(needs=[Need(SCALED, why("fp16"))]), "guard": Fill()},
    summary="float16 with fp32 master weights, for hardware without bfloat16",
)


@hook
def dsx_precision(options: Options) -> list[Part]:
    return [
        Part(
            "dtypes",
            build=lambda ctx: Float16(ctx, options),
            bind=lambda part, ctx: part.bind(ctx.model, options.buffers),
        ),
        guard(),
    ]
